"""A training loop as users write them: DistributedDataParallel over gloo, one step of about 50 ms.

hang.py CASE[.thread] RANKS [STEPS]: at step 100 of the first epoch (of the launcher's) the named ranks do what CASE
says. With .thread all ranks train in a thread, which the main one joins.
"""
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import torch
import torch.distributed as dist

(CASE, _, THREAD), CULPRITS = sys.argv[1].partition("."), [int(r) for r in sys.argv[2].split(",")]
STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 100000
RANK, DIR = int(os.environ["RANK"]), os.environ["DIR"]
AT = 100
FIRST = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
CULPRIT = FIRST and RANK in CULPRITS


def mark(name):
    with open(os.path.join(DIR, name), "a") as f:
        f.write("%.6f\n" % time.time())


def load_batch():
    time.sleep(100000)  # the remote file system does not answer


def preprocess():
    while True:
        pass


def tokenize():
    re.compile(r"(a+)+$").match("a" * 60 + "b")  # runs for ages, and holds the interpreter's lock


def wait_for_driver():
    ctypes.PyDLL(None).pause()  # a call into C that holds the lock and does not return


def spawn_helper():
    fifo = os.path.join(DIR, "fifo%d" % RANK)
    os.mkfifo(fifo)
    os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)])


def save_checkpoint(seconds):
    time.sleep(seconds)


def validate(seconds):
    end = time.time() + seconds
    while time.time() < end:
        torch.randn(64, 64).mm(torch.randn(64, 64))


def evaluate_by_service(seconds):
    end = time.time() + seconds
    while time.time() < end:
        urllib.request.urlopen(os.environ["SERVICE"]).read()
        time.sleep(0.5)


def sync_results(seconds):
    copy = "import time\nwith open('/dev/null', 'wb') as f:\n for _ in range(%d):\n  f.write(bytes(30000)); time.sleep(0.1)\n"
    subprocess.run([sys.executable, "-c", copy % (seconds * 10)])


def await_data(seconds):
    time.sleep(seconds)


def await_file():
    while not os.path.exists(os.path.join(DIR, "never")):
        time.sleep(0.1)


def finish():
    mark("hangs")
    time.sleep(100000)  # the results are on their way to a server that is not there


def beat():
    time.sleep(100000)  # a thread that keeps the process alive


def fail():
    threading.Thread(target=beat).start()
    raise ValueError("a batch of rank %d is bad" % RANK)


def misbehave(tensor):
    mark("hangs")
    if CASE in ("data", "subgroup"):
        load_batch()
    elif CASE == "fail":
        fail()
    elif CASE == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif CASE == "spin":
        preprocess()
    elif CASE == "gil":
        tokenize()
    elif CASE == "pause":
        wait_for_driver()
    elif CASE == "vfork":
        spawn_helper()
    elif CASE == "gather":
        dist.all_gather([torch.zeros(1) for _ in range(dist.get_world_size())], tensor)
    elif CASE == "pause15":
        time.sleep(15)
    elif CASE == "poll":
        await_file()
    elif CASE == "service":
        evaluate_by_service(float(os.environ["SECONDS"]))
    elif CASE == "child":
        sync_results(float(os.environ["SECONDS"]))
    elif CASE == "late":
        await_data(float(os.environ["SECONDS"]))
    elif CASE == "save":
        save_checkpoint(float(os.environ.get("SECONDS", "40")))
    elif CASE == "eval":
        validate(float(os.environ.get("SECONDS", "40")))


def train():
    if CASE == "before" and CULPRIT:
        mark("hangs")
        time.sleep(100000)
    dist.init_process_group("gloo")
    pair = dist.new_group([2, 3]) if CASE == "subgroup" else None
    dist.new_group([0, 1])
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if CASE == "first":
        time.sleep(float(os.environ.get("SECONDS", "60")))
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).sum().backward()
        if step == AT and CULPRIT:
            misbehave(torch.zeros(1))
        if pair is None and step % 5 == 0:
            dist.all_reduce(torch.zeros(1))
        if pair is not None and RANK in (2, 3):
            dist.all_reduce(torch.zeros(1), group=pair)
        optimizer.step()
        time.sleep(0.04)
        if step == 10:
            mark("up.%d" % RANK)
        if os.path.exists(os.path.join(DIR, "go")) and step % 5 == 0:
            stop = torch.ones(1)
        else:
            stop = torch.zeros(1)
        if step % 20 == 0:
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
            if stop.item():
                break
    mark("trained.%d" % RANK)
    if CASE == "after" and CULPRIT:
        finish()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if THREAD:
        loop = threading.Thread(target=train)
        loop.start()
        loop.join()
    else:
        train()
    mark("done.%d" % RANK)
