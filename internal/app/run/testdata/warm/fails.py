"""An exception after the restart, and code at the exit."""
import atexit
import time

import facts

facts.begin()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

atexit.register(facts.say, "at exit")
facts.late()
dist.init_process_group("gloo")
torch.manual_seed(1)
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.Adam([parameter])
for n in range(facts.STEPS):
    (parameter * n).sum().backward()
    optimizer.step()
    facts.loss(parameter.item())
    dist.barrier()
if facts.RANK == 1:
    raise ValueError("of the script")
time.sleep(1000)
