"""Process groups over gloo, one after the other, each with a part of the store of its own, as docs/start/from-torchrun.md says."""
import os
import sys

import torch
import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
for n in range(int(sys.argv[1])):
    dist.init_process_group("gloo", store=dist.PrefixStore("group%d" % n, store), rank=rank, world_size=size)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size, x
    dist.destroy_process_group()
print("all of them")
