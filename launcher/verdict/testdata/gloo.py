"""One rank of a gloo job in which rank 1 fails: gloo.py RANK STORE_FILE raise|kill."""
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]


@record
def main():
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=3)
    t = torch.ones(4)
    dist.all_reduce(t)
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        raise ValueError("bad batch")
    while True:
        dist.all_reduce(t)


main()
