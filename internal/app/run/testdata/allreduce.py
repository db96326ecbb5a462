"""A real process group over gloo that sums ranks until it is told to end.

Leaves marks in the directory argv[1]: trained.<world size> after ten sums, and
trained.<world size>.again when a world of that size trains for the second time.
"""

import os
import sys
import time

import torch
import torch.distributed as dist


def main():
    marks = sys.argv[1]
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mark = os.path.join(marks, "trained.%d" % size)
    if os.path.exists(mark):
        mark += ".again"
    dist.barrier()
    step = 0
    while True:
        x = torch.tensor([float(rank), float(os.path.exists(os.path.join(marks, "go")))])
        dist.all_reduce(x)
        assert x[0].item() == size * (size - 1) / 2, x
        step += 1
        if step == 10 and rank == 0:
            open(mark, "w").close()
        if x[1].item() == size:  # every rank has seen the mark
            break
        time.sleep(0.01)
    dist.destroy_process_group()


main()
