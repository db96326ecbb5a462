"""Works, 20 frames deep, and has 49 threads that sleep as deep. Its turns, and its processor time in ns, are in a file.

It ends when a turn has a wrong result.
"""
import mmap
import os
import struct
import sys
import threading
import time


def deep(n, f):
    return deep(n - 1, f) if n else f()


def work():
    with open(sys.argv[1], "r+b") as file:
        page = mmap.mmap(file.fileno(), 16)
    right, turns = None, 0
    while True:
        result = sum(int(s) for s in sorted(str(i * 7919 % 1009) for i in range(200)))
        right = right or result
        if result != right:
            os._exit(1)
        turns += 1
        struct.pack_into("<qq", page, 0, turns, time.process_time_ns())


for _ in range(49):
    threading.Thread(target=deep, args=(20, lambda: time.sleep(1e6)), daemon=True).start()
deep(20, work)
