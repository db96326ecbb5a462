"""Saves in ways that training seldom does: saves.py MODE MARKS CHECKPOINTS. Each rank adds what it finds to MARKS/found.

burst BYTES N  N quick DISK saves
unlock         each rank loses the CPU between the end of its save and the release of its segment
several        four checkpoint directories, saved in turn in memory; then the process dies, and starts again
refused        a DISK save to storage that takes nothing
back           DISK 10, DISK 5, MEMORY 3; then the process dies, and starts again
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

mode, marks, top = sys.argv[1:4]
world = int(os.environ["WORLD_SIZE"])
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def found(*what):
    with open(os.path.join(marks, "found"), "a") as f:
        f.write(" ".join(str(x) for x in what) + "\n")


def checkpointer(directory):
    return DdpCheckpointer(directory, local_shard_num=world, global_shard_num=world)


def burst(nbytes, n):
    c = checkpointer(top)
    for step in range(1, n + 1):
        c.save_checkpoint(step, {"w": torch.ones(nbytes // 4), "step": step})
    c.wait_latest_checkpoint(60)


def unlock():
    from dlrover_ckpt import pool

    release = pool.Pool.release

    def slow(*args):
        time.sleep(0.02 + 0.06 * dist.get_rank())
        release(*args)

    pool.Pool.release = slow
    c = checkpointer(top)
    c.save_checkpoint(1, {"w": torch.ones(1000)})
    c.wait_latest_checkpoint(60)
    dist.barrier()


def refused():
    c = DdpCheckpointer(top, local_shard_num=world, global_shard_num=world, save_timeout=1)
    open(os.path.join(top, ".dlrover"), "a").close()  # where the checkpoints' own directory has to be
    c.save_checkpoint(1, {"w": torch.ones(1000)})
    try:
        c.wait_latest_checkpoint(60)
    except RuntimeError as e:
        found("error", str(e).count("step 1"))


def several():
    cs = [checkpointer(os.path.join(top, str(k))) for k in range(4)]
    if first:
        for step in (1, 2):
            for k, c in enumerate(cs):
                c.save_checkpoint(step, {"is": 10 * step + k}, storage_type=StorageType.MEMORY)
    found(*[c.load_checkpoint().get("is") for c in cs])


def back():
    c = checkpointer(top)
    if first:
        for step, kind in ((10, StorageType.DISK), (5, StorageType.DISK), (3, StorageType.MEMORY)):
            c.save_checkpoint(step, {"step": step}, storage_type=kind)
    found(c.load_checkpoint().get("step"))


if world > 1:
    dist.init_process_group("gloo")
if mode == "burst":
    burst(*[int(x) for x in sys.argv[4:6]])
else:
    globals()[mode]()
if first and mode in ("several", "back"):
    os.kill(os.getpid(), signal.SIGKILL)
