"""A replica group of one rank. It trains w towards 1, however many groups take part, and tells it as the others do.

A group that comes back gets w and the step from those that went on.
"""

import os
from datetime import timedelta

import torch
import torchft

import told

model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=10)),
    state_dict=model.state_dict,
    load_state_dict=model.load_state_dict,
    min_replica_size=1,
    use_async_quorum=False,
    replica_id="group" + os.environ["REPLICA_GROUP_ID"],
    timeout=timedelta(seconds=20),
)
parallel = torchft.DistributedDataParallel(manager, model)
optimizer = torchft.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=told.RATE))
one = torch.ones(1, 1)
while not told.wanted():
    optimizer.zero_grad()
    loss = ((parallel(one) - one) ** 2 / 2).sum()
    loss.backward()
    rank, world, before = manager.participating_rank(), manager.num_participants(), manager.current_step()
    mean = torch.tensor([rank + 1.0])
    manager.allreduce(mean).wait()
    optimizer.step()
    if manager.current_step() > before and rank is not None:
        told.step(rank, world, before + 1, model.weight * (world + 1) / 2, mean * world)
manager.shutdown(wait=False)
