"""A gloo job of three ranks in which rank 1 fails: gloo.py DIR raise|kill.

The ranks are forks, for which PyTorch is imported once. It prints how they have ended, as a JSON list in that order.
What they write is in DIR, and so are their error files.
"""
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

WORLD = 3
folder, how = sys.argv[1], sys.argv[2]


@record
def main():
    dist.init_process_group("gloo", init_method="file://" + folder + "/store", rank=rank, world_size=WORLD)
    t = torch.ones(4)
    dist.all_reduce(t)
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        raise ValueError("bad batch")
    while True:
        dist.all_reduce(t)


ranks = {}
for rank in range(WORLD):
    pid = os.fork()
    if pid == 0:
        output = os.open("%s/%d.log" % (folder, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["TORCHELASTIC_ERROR_FILE"] = "%s/%d.json" % (folder, rank)
        break
    ranks[pid] = rank
else:
    ends = []
    for _ in ranks:
        pid, status = os.wait()
        ends.append({"rank": ranks[pid], "code": os.waitstatus_to_exitcode(status), "at": time.time_ns()})
    json.dump(ends, sys.stdout)
    sys.exit()
main()
