"""frameworks/train_torch.py, which first tells in LOG.starts where it is: rank, world, node, restarts, process."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "frameworks"))
import told

with open(told.LOG + ".starts", "a") as starts:
    names = ("RANK", "WORLD_SIZE", "NODE_RANK", "TORCHELASTIC_RESTART_COUNT")
    starts.write(" ".join([os.environ[name] for name in names] + [str(os.getpid())]) + "\n")

import train_torch
