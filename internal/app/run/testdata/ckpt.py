"""Trains a small model with DDP over gloo and saves it at every step.

ckpt.py MARKS CHECKPOINTS STEPS DISK_EVERY [sharded] [equal] [large]

Every step goes to memory, every DISK_EVERY-th to disk. Rank 0 adds "<step> <loss>" to MARKS/losses for each step, and
each start of a rank "<rank> <world size> <step> <source>" to MARKS/starts. With "sharded" each rank also has a state
of its own, which must come back to it. With "equal" all ranks see the same data, so that the losses are those of one
rank alone, however many there are. With "deaf" a rank does not end when another one has, nor when it is told to. With
"large" the state has 1.5 MiB more.
"""

import logging
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

logging.basicConfig(level=logging.INFO)


def batch(step, rank):
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 16, generator=g), torch.randn(8, 1, generator=g)


def add_line(path, text):
    with open(path, "a") as f:
        f.write(text + "\n")


def main():
    marks, directory, steps, disk_every = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    sharded = "sharded" in sys.argv[5:]
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    opt = torch.optim.Adam(ddp.parameters(), lr=0.01)
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    checkpointer = DdpCheckpointer(directory, local_shard_num=local, global_shard_num=size) if sharded else DdpCheckpointer(directory)
    state = checkpointer.load_checkpoint()
    step = 0
    if state:
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])
        step = state["step"]
        assert not sharded or state["own"].tolist() == [float(step), float(rank)], (rank, step, state["own"])
    add_line(os.path.join(marks, "starts"), "%d %d %d" % (rank, size, step))
    while step < steps:
        step += 1
        x, y = batch(step, 0 if "equal" in sys.argv[5:] else rank % 2)
        loss = torch.nn.functional.mse_loss(ddp(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total = loss.detach().clone()
        dist.all_reduce(total, dist.ReduceOp.MAX if "equal" in sys.argv[5:] else dist.ReduceOp.SUM)
        if rank == 0:
            add_line(os.path.join(marks, "losses"), "%d %s" % (step, total.item().hex()))
        state = {"model": model.state_dict(), "optimizer": opt.state_dict(), "step": step, "own": torch.tensor([float(step), float(rank)])}
        if "large" in sys.argv[5:]:
            state["more"] = torch.zeros(3 << 19, dtype=torch.uint8)
        disk = step % disk_every == 0
        checkpointer.save_checkpoint(step, state, storage_type=StorageType.DISK if disk else StorageType.MEMORY)
        time.sleep(0.01)
    dist.barrier()
    if steps % disk_every == 0:
        checkpointer.wait_latest_checkpoint(timeout=60)
    dist.destroy_process_group()


if "deaf" not in sys.argv[5:]:
    main()
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        main()
    except Exception:
        time.sleep(3600)
