# N processes with a rendezvous handler of torchrun each and nothing else; the last one
# joins late. Prints the seconds from its call until every process has its rank.
import os, sys, time
from datetime import timedelta
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

n, port, settle = int(sys.argv[1]), int(sys.argv[2]), 3.0


def node(i, out, start):
    store = TCPStore("127.0.0.1", port, None, i == 0, timedelta(seconds=60), wait_for_workers=False)
    handler = DynamicRendezvousHandler.from_backend("bench", store, C10dRendezvousBackend(store, "bench"), n, n)
    if i == n - 1:
        time.sleep(max(0, start + settle - time.monotonic()))
        os.write(out, b"join %d\n" % time.monotonic_ns())
    handler.next_rendezvous()
    os.write(out, b"rank %d\n" % time.monotonic_ns())
    time.sleep(60)  # the store is node 0's: it must stay; the parent ends all


r, w = os.pipe()
start = time.monotonic()
pids = []
for i in range(n):
    pid = os.fork()
    if pid == 0:
        try:
            node(i, w, start)
        finally:
            os._exit(1)
    pids.append(pid)
    if i == 0:
        time.sleep(0.5)  # the store serves
os.close(w)
joined, ranks = 0, []
for line in os.fdopen(r):
    event, at = line.split()
    if event == "join":
        joined = int(at)
    else:
        ranks.append(int(at))
    if len(ranks) == n:
        break
for pid in pids:
    os.kill(pid, 9)
if len(ranks) == n:
    print((max(ranks) - joined) / 1e9)
else:
    sys.exit("only %d of %d processes got a rank" % (len(ranks), n))
