"""Blocks its main thread in the way that its argument says."""
import ctypes
import os
import re
import sys
import tempfile
import threading
import time


def say():
    os.write(1, b"now\n")


def asleep():
    say()
    time.sleep(10000)


def locked():
    lock = threading.Lock()
    lock.acquire()
    say()
    lock.acquire()


def spins():
    say()
    while True:
        pass


def spins_in_c():
    pattern = re.compile("(a+)+$")
    say()
    pattern.match("a" * 60 + "b")


def sleeps_with_gil():
    say()
    ctypes.PyDLL(None).pause()


def uninterruptible():
    """The child shares our memory, and waits for a writer before it executes anything."""
    d = tempfile.mkdtemp()
    fifo = os.path.join(d, "fifo")
    os.mkfifo(fifo)
    os.write(1, (fifo + "\n").encode())
    os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)])


def forked():
    """From a thread, so that the child's main thread is not the parent's."""
    def child():
        pid = os.fork()
        if pid == 0:
            in_child(os.getppid())
        os.write(1, (str(pid) + "\n").encode())

    t = threading.Thread(target=child)
    t.start()
    t.join()
    time.sleep(10000)


def in_child(parent):
    while os.getppid() == parent:
        time.sleep(0.05)
    os._exit(0)


def many(n=200):
    """Native threads that are not Python's come and go: what they run in Python they leave again."""
    for _ in range(n):
        threading.Thread(target=time.sleep, args=(10000,), daemon=True).start()
    say()
    time.sleep(10000)


def interpreters():
    """The main thread is in an interpreter that it has made itself."""
    try:
        import _interpreters as made
    except ImportError:
        import _xxsubinterpreters as made
    say()
    made.run_string(made.create(), "def within():\n    import time\n    time.sleep(10000)\nwithin()")


def main_has_ended():
    """The main thread is a zombie, the process lives."""
    threading.Thread(target=asleep).start()
    time.sleep(0.1)
    ctypes.CDLL(None).pthread_exit(None)


globals()[sys.argv[1]]()
