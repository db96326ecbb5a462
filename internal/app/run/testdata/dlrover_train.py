"""A worker that first tells in LOG.starts where it is: rank, world, node, restarts, process.

With --torch it goes on as frameworks/train_torch.py. Else it trains the same over sockets, as most tests are about what
launchers, agents and masters say to each other: PyTorch takes two seconds of a processor to start. Where DLRover has a
part in a job, the worker of rank 0 serves at MASTER_ADDR:MASTER_PORT.
"""

import os
import socket
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "frameworks"))
import told


def connected(address):
    """A connection to rank 0, which may start later."""
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(address, 60)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def exchange(peers, rank, values):
    """The sums of the values of all ranks. A rank that has ended ends the others, in the words of gloo."""
    line = " ".join(map(str, values)) + "\n"
    if rank:
        peers[0].write(line)
        peers[0].flush()
        return [int(v) for v in peers[0].readline().split()] or sys.exit("connection closed by peer")
    rows = [values] + [[int(v) for v in p.readline().split()] or sys.exit("connection closed by peer") for p in peers]
    sums = [sum(column) for column in zip(*rows)]
    for p in peers:
        p.write(" ".join(map(str, sums)) + "\n")
        p.flush()
    return sums


def train():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank:
        sockets = [connected(address)]
    else:
        server = socket.create_server(address, backlog=world)
        sockets = [server.accept()[0] for _ in range(world - 1)]
    peers = [s.makefile("rw") for s in sockets]
    number, stop, w = 0, 0, 0.0
    while not stop:
        total, stop = exchange(peers, rank, [rank + 1, told.wanted()])
        w += told.RATE * (total / world - w)
        number += 1
        told.step(rank, world, number, w, total)


with open(told.LOG + ".starts", "a") as starts:
    names = ("RANK", "WORLD_SIZE", "NODE_RANK", "TORCHELASTIC_RESTART_COUNT")
    starts.write(" ".join([os.environ[name] for name in names] + [str(os.getpid())]) + "\n")

if "--torch" in sys.argv:
    import train_torch
else:
    train()
