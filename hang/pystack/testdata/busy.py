"""Works in two threads while others come and go, and checks its results. Says its turns when its input ends."""
import os
import sys
import threading

turns = [0, 0]
ending = threading.Event()


def deep(n, f, *args):
    return deep(n - 1, f, *args) if n else f(*args)


def turn():
    return sum(int(s) for s in sorted(str(i * 7919 % 1009) for i in range(50)))


def work(i):
    while not ending.is_set():
        if deep(10, turn) != right:
            os._exit(3)
        turns[i] += 1


def churn():
    while not ending.is_set():
        t = threading.Thread(target=deep, args=(5, turn))
        t.start()
        t.join()


right = turn()
threads = [threading.Thread(target=f, args=a) for f, a in ((work, (0,)), (work, (1,)), (churn, ()))]
for t in threads:
    t.start()
os.write(1, b"now\n")
sys.stdin.read()
ending.set()
for t in threads:
    t.join()
os.write(1, b"%d\n" % min(turns))
