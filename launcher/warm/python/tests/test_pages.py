"""The pages that forks come to write."""

import mmap
import os
import platform
import resource
import sys
import threading
import time
import types
import unittest

import help

sys.path.insert(0, help.TREE)
from _dlrover_warm import pages, wire  # noqa: E402

_N = 128
_CAN_COPY = tuple(int(n) for n in platform.release().split("-")[0].split(".")[:2]) >= (5, 14)


class Pages(unittest.TestCase):
    def setUp(self):
        self.memory = mmap.mmap(-1, _N * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.addCleanup(self.memory.close)
        self.memory[:] = b"x" * len(self.memory)
        anchor = pages.ctypes.c_char.from_buffer(self.memory)
        self.begin = pages.ctypes.addressof(anchor)
        del anchor

    def in_fork(self, work):
        """What work returns in a fork: a number up to 200."""
        pid = os.fork()
        if pid == 0:
            result = 201
            try:
                result = work()
            finally:
                os._exit(result)
        return os.WEXITSTATUS(os.waitpid(pid, 0)[1])

    def ours(self, runs):
        """The numbers of the pages of memory among runs."""
        at = [(b - self.begin) // mmap.PAGESIZE + i for b, n in zip(runs[::2], runs[1::2])
              for i in range(n // mmap.PAGESIZE)]
        return [i for i in at if 0 <= i < _N]

    def test_copied(self):
        def work():
            for i in (1, 2, 3, 40):
                self.memory[i * mmap.PAGESIZE] = 1
            return 0 if self.ours(pages.copied()) == [1, 2, 3, 40] else 1
        self.assertEqual(self.in_fork(work), 0)

    def test_no_more_than_a_fork_may_have(self):
        most, pages._MOST = pages._MOST, 2 * mmap.PAGESIZE
        try:
            self.assertEqual(sum(pages.copied()[1::2]), 2 * mmap.PAGESIZE)
        finally:
            pages._MOST = most

    def test_called_off(self):
        sys.modules["torch"] = types.ModuleType("torch")
        self.addCleanup(sys.modules.pop, "torch")
        ours, theirs = os.pipe()
        self.addCleanup(wire.close, [ours, theirs])
        self.assertEqual(list(pages.written(lambda: time.sleep(600), 0.1, ours)), [], "that is stuck")
        threading.Timer(0.2, os.write, [theirs, b"x"]).start()
        self.assertIsNone(pages.written(lambda: time.sleep(600), 300, ours))

    @unittest.skipUnless(_CAN_COPY, "COPIES OF PAGES ARE NOT TESTED: this needs Linux 5.14, not " + platform.release())
    def test_copy(self):
        def faults(runs):
            def work():
                pages.copy(runs)
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                for i in range(_N):
                    self.memory[i * mmap.PAGESIZE] = 1
                return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            return self.in_fork(work)
        self.assertGreaterEqual(faults(()), _N)
        gone = (1 << 40, mmap.PAGESIZE)
        self.assertLess(faults(gone + (self.begin, len(self.memory))), _N / 4)


if __name__ == "__main__":
    unittest.main()
