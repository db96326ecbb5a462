"""Trains with DLRover's elastic sampler, loader and trainer, as its examples do, and saves each step in memory.

elastic.py MARKS CHECKPOINTS SAMPLES EPOCHS

Each start of a rank adds "<start> <rank> <ranks> <step>" to MARKS/starts, and each batch, before it is saved,
"<start> <step> <epoch> <samples>" to MARKS/batches: step is that of the optimizer which takes its gradients.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from dlrover.trainer.torch.elastic.dataloader import ElasticDataLoader
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler
from dlrover.trainer.torch.elastic.trainer import ElasticTrainer
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

marks, directory, samples, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
start = os.environ["DLROVER_CKPT_EPOCH"]


def add_line(file, *values):
    with open(os.path.join(marks, file), "a") as f:
        f.write(" ".join(map(str, values)) + "\n")


dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
sampler = ElasticDistributedSampler(torch.arange(samples))
loader = ElasticDataLoader(torch.arange(samples), batch_size=2, sampler=sampler)
checkpointer = DdpCheckpointer(directory)
state = checkpointer.load_checkpoint()
if state:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    sampler.load_state_dict(state["sampler"])
step = state.get("step", 0)
trainer = ElasticTrainer(model, dataloader=loader)
optimizer, scheduler = trainer.prepare(optimizer, scheduler)
add_line("starts", start, dist.get_rank(), dist.get_world_size(), step)
for epoch in range(sampler.epoch, epochs):
    sampler.set_epoch(epoch)
    trainer.reset()
    for batch in loader:
        with trainer.step(fix_total_batch_size=True):
            optimizer.zero_grad()
            model(batch.float()[:, None]).sum().backward()
            optimizer.step()
            scheduler.step()
            add_line("batches", start, step + 1, epoch, *batch.tolist())
            if trainer.gradient_state.sync_gradients:
                step += 1
                checkpointer.save_checkpoint(step, {
                    "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
                    "sampler": sampler.state_dict(trainer.num_steps, loader.batch_size),
                }, storage_type=StorageType.MEMORY)
        time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
