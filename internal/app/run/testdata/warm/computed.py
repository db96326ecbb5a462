"""A variable of OpenMP that only running the script tells."""
import os

import facts

facts.begin(pools=False)
os.environ["OMP_NUM_THREADS"] = str(1 + facts.WORLD)

import torch  # noqa: E402

facts.late()
facts.same("threads", torch.get_num_threads())
facts.ddp()
facts.end()
