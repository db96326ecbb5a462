import torch
import torch.distributed as dist

import told

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(parallel.parameters(), lr=told.RATE)
one, target = torch.ones(1, 1), torch.full((1, 1), rank + 1.0)
number, stop = 0, 0
while not stop:
    optimizer.zero_grad()
    loss = ((parallel(one) - target) ** 2 / 2).sum()
    loss.backward()
    optimizer.step()
    sums = torch.tensor([rank + 1, told.wanted()])
    dist.all_reduce(sums)
    total, stop = sums.tolist()
    number += 1
    told.step(rank, world, number, model.weight, total)
dist.destroy_process_group()
