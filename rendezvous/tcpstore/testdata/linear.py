"""Has four of PyTorch's clients use the store at argv[1:3] at the same time, and writes what they have asked and heard,
a line of JSON each: client, operation, key, value, expected, answer, and the times on the system's monotonic clock."""
import json
import os
import random
import sys
import threading
import time
from datetime import timedelta

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # a time-out of a wait is no news
from torch.distributed import TCPStore  # noqa: E402

host, port = sys.argv[1], int(sys.argv[2])
lines = []


def connect():
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    store.set_timeout(timedelta(milliseconds=300))
    return store


def ask(store, op, key, value, expected):
    if op == "set":
        return store.set(key, value)
    if op == "get":
        return store.get(key).decode()
    if op == "add":
        return str(store.add(key, 1))
    if op == "compare_set":
        return store.compare_set(key, expected, value).decode()
    if op == "delete":
        return str(store.delete_key(key)).lower()
    if op == "wait":
        return store.wait([key], timedelta(milliseconds=300))
    if op == "append":
        return store.append(key, value)
    return str(store.check([key])).lower()


def client(number):
    store, seen = connect(), ""
    ops = ["set", "get", "get", "compare_set", "delete", "wait"]
    if hasattr(store, "append"):
        ops += ["append", "check"]
    for n in range(40):
        key, op = random.choice(["a", "b", "n"]), random.choice(ops)
        value, expected = "%d.%d" % (number, n), random.choice(["", seen])
        if key == "n":
            op, value = random.choice(["add", "get", "delete"]), "1"
        call = time.monotonic_ns()
        try:
            answer = ask(store, op, key, value, expected)
        except Exception:  # nobody has set the key in time; releases before 2.1 are out of step then
            store = connect()
            lines.append([number, "broken", "", "", "", "", call, call])
            continue
        if op == "get" and key != "n":
            seen = answer
        lines.append([number, op, "/" + key, value, expected, answer or "", call, time.monotonic_ns()])


threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
for t in threads:
    t.start()
for t in threads:
    t.join()
for line in lines:
    print(json.dumps(line))
