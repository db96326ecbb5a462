"""Trains on shards of data, which the ranks fetch by DLRover's client.

shards.py MARKS CHECKPOINTS RECORDS EPOCHS saved|kept

With "saved" what is left of the data is in the checkpoint of each step, and is restored from it; with "kept" there is
no checkpoint. The files in MARKS are those of elastic.py, but all records are of epoch 0.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from dlrover.python.elastic_agent.sharding.client import ShardingClient
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

marks, directory, size, epochs, saved = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
start = os.environ["DLROVER_CKPT_EPOCH"]


def add_line(file, *values):
    with open(os.path.join(marks, file), "a") as f:
        f.write(" ".join(map(str, values)) + "\n")


client = ShardingClient("train", batch_size=2, num_epochs=epochs, dataset_size=size, shuffle=True, storage_type="text",
                        num_minibatches_per_shard=2)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
checkpointer = DdpCheckpointer(directory)
state = checkpointer.load_checkpoint() if saved == "saved" else {}
if state:
    client.restore_shard_from_checkpoint(state["shards"])
step = state.get("step", 0)
add_line("starts", start, rank, ranks, step)
while True:
    shard = client.fetch_shard()
    if shard:
        add_line("batches", start, step + 1, 0, *shard.indices)
        for i in range(0, len(shard.indices), 2):
            client.report_batch_done(len(shard.indices[i:i + 2]))
    fetched = torch.tensor(1 if shard else 0)
    dist.all_reduce(fetched)
    if not fetched.item():
        break
    step += 1
    if saved == "saved":
        box = [client.get_shard_checkpoint() if rank == 0 else None]
        dist.broadcast_object_list(box)
        checkpointer.save_checkpoint(step, {"step": step, "shards": box[0]}, storage_type=StorageType.MEMORY)
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
