"""Variables that the script sets before it imports what reads them."""
import os

import facts

facts.begin(pools=False)
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
os.environ["OMP_NUM_THREADS"] = "3"
os.environ.setdefault("TORCH_SHOW_CPP_STACKTRACES", "1")

import torch  # noqa: E402

facts.late()
os.environ["OMP_NUM_THREADS"] = "2"  # too late
facts.same("threads", torch.get_num_threads())
facts.same("variables", {n: v for n, v in os.environ.items() if n.startswith(("OMP_", "TORCH_", "CUDA_"))})
facts.ddp()
facts.end()
