"""A training loop over gloo of about 100 ms a step, of which a rank may take more.

slow.py CASE RANK FACTOR [DISK], until there is $DIR/go. data: the batches of the rank come later; disk: it reads them
from DISK/batch; stop: it is stopped for a part of the time; compute: it computes for longer; quota: it needs a CPU, and
its pid is in $DIR/pid; healthy: all have uneven batches, and rank 0 evaluates and logs.
"""
import os
import random
import subprocess
import sys
import time

import torch
import torch.distributed as dist

CASE, CULPRIT, FACTOR = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
RANK, DIR = int(os.environ["RANK"]), os.environ["DIR"]
PIECES, EACH = 20, 0.004

STOPPER = """
import os, signal, sys, time
pid, run, stop = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
while os.getppid() == pid:
    time.sleep(run)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(stop)
    os.kill(pid, signal.SIGCONT)
"""


class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 30

    def __getitem__(self, i):
        if CASE == "data" and RANK == CULPRIT:
            time.sleep((FACTOR - 1) * PIECES * EACH)
        if CASE == "disk" and RANK == CULPRIT:
            with open(os.path.join(sys.argv[4], "batch"), "rb") as f:
                f.read()
        return torch.randn(64)


def compute(factor):
    """Pieces, as of kernels: one that is stopped comes later with all that follow."""
    for _ in range(PIECES):
        if CASE == "quota" and RANK == CULPRIT:
            end = time.thread_time() + EACH
            while time.thread_time() < end:
                pass
        else:
            time.sleep(EACH * factor)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rng = random.Random(RANK)
    if CASE == "stop" and RANK == CULPRIT:  # of 100 ms it runs for so many that all takes FACTOR times as long
        subprocess.Popen([sys.executable, "-c", STOPPER, str(os.getpid()), str(0.1 / FACTOR), str(0.1 - 0.1 / FACTOR)])
    if CASE == "quota" and RANK == CULPRIT:
        with open(os.path.join(DIR, "pid"), "w") as f:
            f.write(str(os.getpid()))
    for step, batch in enumerate(torch.utils.data.DataLoader(Batches(), batch_size=1)):
        factor = 1.0
        if CASE == "compute" and RANK == CULPRIT:
            factor = FACTOR
        if CASE == "healthy":
            factor = rng.uniform(0.6, 1.4)
            if RANK == 0 and step % 100 == 99:
                time.sleep(4)  # an evaluation
            if RANK == 0 and step % 10 == 0:
                time.sleep(0.03)  # its log
        optimizer.zero_grad()
        compute(factor)
        model(batch).sum().backward()
        optimizer.step()
        if step == 20 and RANK == 0:
            with open(os.path.join(DIR, "up"), "w") as f:
                f.write("trains\n")
        if step % 20 == 0:
            stop = torch.tensor([float(os.path.exists(os.path.join(DIR, "go")))])
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
            if stop.item():
                break
    dist.barrier()
    dist.destroy_process_group()


main()
