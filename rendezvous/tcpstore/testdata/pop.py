"""Eight clients pop 200 items, again and again: a blocking queue_pop never finds the queue empty."""
import sys
import threading
from datetime import timedelta

import torch.distributed as dist

HOST, PORT, ROUNDS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
CLIENTS, ITEMS = 8, 200


def connect():
    return dist.TCPStore(HOST, PORT, None, False, timedelta(seconds=60))


def pop(store, queue, errors):
    try:
        for _ in range(ITEMS // CLIENTS):
            store.queue_pop(queue)
    except Exception as e:
        errors.append(repr(e))


stores, producer, errors = [connect() for _ in range(CLIENTS)], connect(), []
if not hasattr(producer, "queue_pop"):
    sys.exit("this PyTorch has no queues")
for n in range(ROUNDS):
    threads = [threading.Thread(target=pop, args=(s, "q%d" % n, errors)) for s in stores]
    for t in threads:
        t.start()
    for i in range(ITEMS):
        producer.queue_push("q%d" % n, str(i))
    for t in threads:
        t.join()
    if errors:
        sys.exit("round %d: %s" % (n, errors))
print("popped", ROUNDS * ITEMS)
