"""Trains until DIR/go exists. Each start of a rank adds "rank/ranks:restarts" to DIR/starts, and rank 0 its step to
DIR/step. DIR/pid.RANK has its process."""

import os
import time

import torch
import torch.distributed as dist

marks = os.environ["DIR"]
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
with open(os.path.join(marks, "starts"), "a") as f:
    f.write("%d/%d:%s\n" % (rank, ranks, os.environ["TORCHELASTIC_RESTART_COUNT"]))
with open(os.path.join(marks, "pid.%d" % rank), "w") as f:
    f.write("%d\n" % os.getpid())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
step, go = 0, torch.zeros(1)
while not go.item():
    model(torch.ones(1, 1)).sum().backward()
    go.fill_(os.path.exists(os.path.join(marks, "go")))
    dist.all_reduce(go, op=dist.ReduceOp.MIN)
    step += 1
    if rank == 0:
        with open(os.path.join(marks, "step"), "w") as f:
            f.write("%d\n" % step)
    time.sleep(0.05)
dist.destroy_process_group()
