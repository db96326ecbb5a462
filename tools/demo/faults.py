"""A worker with a fault: faults.py FAULT [DIRECTORY], in a world of two or more."""
import sys
import time

import torch
import torch.distributed as dist

fault = sys.argv[1]


def load_batch(step):
    if fault == "hang" and step == 60 and dist.get_rank() == 1:
        time.sleep(3600)  # the remote file system does not answer


def train():
    dist.init_process_group("gloo")
    if fault == "disk":
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        saves = DdpCheckpointer(sys.argv[2], local_shard_num=1, global_shard_num=2)
    for step in range(1, 100000):
        load_batch(step)
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)
        if fault == "crash" and step == 20 and dist.get_rank() == 1:
            raise KeyError("learning_rate")
        if fault == "disk" and step % 40 == 0:
            saves.save_checkpoint(step, {"weights": torch.ones(400000)}, storage_type=StorageType.DISK)


train()
