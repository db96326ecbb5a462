"""Copies into segments: the machine code, what takes its place, and how the work is shared."""

import ctypes
import os
import platform
import random
import threading
import types
import unittest
from array import array
from unittest import mock

import core_help  # noqa: F401  finds the client

from dlrover_ckpt import copying, stream


class Memory:
    """Bytes at an address that is a multiple of 64."""

    def __init__(self, data):
        self.raw = bytearray(64 + len(data))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.raw))
        self.skip = -start % 64
        self.raw[self.skip:self.skip + len(data)] = data
        self.addr, self.size = start + self.skip, len(data)
        self.view = memoryview(self.raw)[self.skip:self.skip + len(data)]


@unittest.skipIf(stream.copier() is None, "NO STREAMING COPIES on " + platform.machine())
class Stream(unittest.TestCase):
    def copied(self, size, rows):
        """Copies [(to, from, n)] from random bytes; returns what came out and what should."""
        src, dst = Memory(os.urandom(size)), Memory(b"\xaa" * size)
        table = array("Q")
        want = bytearray(b"\xaa" * size)
        for to, at, n in rows:
            table.extend((dst.addr + to, src.addr + at, n))
            want[to:to + n] = src.view[at:at + n]
        stream.copier()(table.buffer_info()[0], len(rows))
        return bytes(dst.view), bytes(want)

    def test_every_length_and_source_alignment_and_not_a_byte_more(self):
        for n in list(range(200)) + [4095, 4096, 4097, 9999]:
            for at in (0, 1, 15, 63):
                got, want = self.copied(12000, [(64, at, n)])
                self.assertEqual(got, want, (n, at))

    def test_many_rows(self):
        rng = random.Random(7)
        rows, to = [], 0
        for _ in range(3000):
            n = rng.choice((0, 1, 63, 64, 65, rng.randrange(2000)))
            rows.append((to, rng.randrange(1 << 20), n))
            to += -(-n // 16) * 16 + 16 * rng.randrange(3)
        got, want = self.copied(to + (1 << 20) + 4096, rows)
        self.assertEqual(got, want)

    def test_no_rows(self):
        self.assertEqual(*self.copied(64, []))

    def test_threads_at_the_same_time(self):
        size = 1 << 22
        src, dst = Memory(os.urandom(size)), Memory(bytes(size))
        parts = [array("Q", (dst.addr + o, src.addr + o, size // 8)) for o in range(0, size, size // 8)]
        threads = [threading.Thread(target=stream.copier(), args=(p.buffer_info()[0], 1)) for p in parts]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(src.view, dst.view)


class Fallback(unittest.TestCase):
    def tearDown(self):
        stream.copier.cache_clear()

    def test_another_processor(self):
        stream.copier.cache_clear()
        with mock.patch("os.uname", return_value=types.SimpleNamespace(machine="aarch64")):
            self.assertIsNone(stream.copier())

    def test_a_system_that_forbids_code_made_at_run_time(self):
        stream.copier.cache_clear()
        with mock.patch("dlrover_ckpt.stream._executable", side_effect=PermissionError(13, "denied")):
            self.assertIsNone(stream.copier())



class Moves(unittest.TestCase):
    def check(self, rows, size=3 << 20):
        src, dst = Memory(os.urandom(size)), Memory(bytes(size))
        want = bytearray(size)
        for to, at, n in rows:
            want[to:to + n] = src.view[at:at + n]
        moves = copying._moves(copying._cut([(dst.addr + to, src.addr + at, n) for to, at, n in rows]), dst)
        for threads in (1, 2, 5):
            dst.view[:] = bytes(size)
            copying._run(moves, threads)
            self.assertEqual(bytes(dst.view), bytes(want), threads)
        return moves

    ROWS = [(0, 5, 1000), (1024, 7, 300 << 10), (1 << 20, 1 << 20, 1 << 20), ((2 << 20) + 1, 3, 700),
            ((2 << 20) + 1000, 9, 300 << 10)]

    def test_streamed_and_unaligned(self):
        self.check(self.ROWS)

    def test_without_streaming(self):
        with mock.patch("dlrover_ckpt.stream.copier", return_value=None):
            self.check(self.ROWS)

    def test_nothing(self):
        self.assertEqual(self.check([]), [])

    def test_large_copies_are_shared(self):
        with mock.patch("dlrover_ckpt.copying._CHUNK", 1 << 18):
            self.assertGreaterEqual(len(self.check([(0, 0, 3 << 20)])), 12)
            self.assertLessEqual(len(self.check([(i << 12, 0, 1 << 12) for i in range(768)])), 12)


if __name__ == "__main__":
    unittest.main()
