# A worker in an endless all_reduce, as a training step; FILE learns when it trains.
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(1)
for step in range(1 << 30):
    dist.all_reduce(x)
    if step == 5:
        line = "train %d %d %d %s %s\n" % (time.monotonic_ns(), os.getpid(), os.getppid(), os.environ["RANK"], os.environ["WORLD_SIZE"])
        with open(sys.argv[1], "a") as f:
            f.write(line)
    time.sleep(0.02)
