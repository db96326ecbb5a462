"""One rank of a gloo job whose store is the server at MASTER_ADDR:MASTER_PORT (the launcher's environment)."""
import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.tensor([rank + 1.0])
dist.all_reduce(x)
assert x.item() == world * (world + 1) / 2, x
dist.barrier()
groups = [dist.new_group(list(range(i, world, 2))) for i in range(2)]
x = torch.tensor([float(rank)])
dist.all_reduce(x, group=groups[rank % 2])
assert x.item() == sum(range(rank % 2, world, 2)), x
objects = [None] * world
dist.all_gather_object(objects, {"rank": rank})
assert [o["rank"] for o in objects] == list(range(world)), objects
if hasattr(dist, "monitored_barrier"):
    dist.monitored_barrier(timeout=timedelta(seconds=30))
dist.barrier()
dist.destroy_process_group()
print("rank %d of %d done, restart %s" % (rank, world, os.environ["TORCHELASTIC_RESTART_COUNT"]))
