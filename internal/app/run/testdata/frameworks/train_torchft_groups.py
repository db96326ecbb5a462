"""A replica group of several ranks. Each rank trains its own w towards 1 with the same rank of the other groups.

It appends a line for each step: group, rank, pid, step, groups that took part, w, and the time. A group that comes back
gets w and the step from those that went on. It ends when LOG.stop exists, or by the exception of a quorum that failed.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torchft

LOG = sys.argv[1]
GROUP, RANK = os.environ["REPLICA_GROUP_ID"], os.environ["RANK"]
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
    state_dict=model.state_dict,
    load_state_dict=model.load_state_dict,
    min_replica_size=1,
    use_async_quorum=False,
    replica_id="group" + GROUP,
    timeout=timedelta(seconds=20),
)
parallel = torchft.DistributedDataParallel(manager, model)
optimizer = torchft.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
one = torch.ones(1, 1)
while not os.path.exists(LOG + ".stop"):
    optimizer.zero_grad()
    ((parallel(one) - one) ** 2 / 2).sum().backward()
    before = manager.current_step()
    optimizer.step()
    if manager.current_step() > before:
        with open(LOG, "a") as log:
            log.write(
                f"{GROUP} {RANK} {os.getpid()} {before + 1} {manager.num_participants()} "
                f"{model.weight.item():.6f} {time.time():.3f}\n"
            )
    time.sleep(0.05)
manager.shutdown(wait=False)
