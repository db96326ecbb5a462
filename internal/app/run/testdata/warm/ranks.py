"""Modules that read at their import what is of one worker, or what the script has set."""
import os

import facts

facts.begin()
os.environ["READS_MODE"] = "of rank %d" % facts.RANK

import torch  # noqa: E402
import reads_rank  # noqa: E402
import reads_mode  # noqa: E402

facts.late()
facts.same("read", [reads_rank.RANK, reads_mode.MODE, torch.__name__])
facts.ddp()
facts.end()
