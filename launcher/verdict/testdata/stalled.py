"""One rank of a gloo job whose rank 2 falls asleep: stalled.py RANK STORE_FILE HOW."""
import datetime
import sys
import time

import torch
import torch.distributed as dist

rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
short = datetime.timedelta(seconds=2)

dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=3)
t = torch.ones(4)
dist.all_reduce(t)
group = dist.new_group([0, 1, 2], timeout=short)
dist.all_reduce(t, group=group)
if rank == 2:
    time.sleep(60)
if how == "all_reduce":
    dist.all_reduce(t, group=group)
elif how == "monitored_barrier":
    dist.monitored_barrier(timeout=short)
elif how == "new_group":
    dist.new_group([0, 1, 2], timeout=short)
