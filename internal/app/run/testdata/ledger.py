"""Trains with steps of 0.05 s, and marks what the time ledger has to find: ledger.py MARKS CHECKPOINTS.

The save of step 10 takes a second more than it would. After step 40 rank 1 stands still for 1.5 s, and dies. The
next workers end with step 20. Rank 1 adds "<what> <seconds>" to MARKS/marks.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from dlrover_ckpt import copying

marks, directory = sys.argv[1:3]
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
fill = copying.fill


def slow(*args):
    time.sleep(1)
    fill(*args)


def mark(what):
    if dist.get_rank() == 1:
        with open(os.path.join(marks, "marks"), "a") as f:
            f.write("%s %.6f\n" % (what, time.time()))


copying.fill = slow
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
checkpointer = DdpCheckpointer(directory)
step = checkpointer.load_checkpoint().get("step", 0)
while step < (40 if first else 20):
    time.sleep(0.05)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    step += 1
    if step == 1 or step == 11 and not first:
        mark("step")
    if step == 10:
        mark("save")
        checkpointer.save_checkpoint(step, {"step": step}, storage_type=StorageType.MEMORY)
        mark("saved")
mark("last")
if first and dist.get_rank() == 1:
    time.sleep(1.5)
    os._exit(1)
dist.barrier()
