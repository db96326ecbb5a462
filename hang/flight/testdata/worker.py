"""A worker whose flight recorder is asked by fifo, as PyTorch's with NCCL are: gloo has the recorder, but no fifo."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

if not hasattr(c10d, "_dump_fr_trace_file"):
    sys.exit("PyTorch %s cannot dump gloo's flight recorder" % torch.__version__)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(2, 3))
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "0.pipe"
os.mkfifo(pipe)
fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
print("ready", flush=True)
while not os.read(fd, 128):
    time.sleep(0.02)
c10d._dump_fr_trace_file(0)
