"""Decisions without files: which buffer, which save, which steps go."""

import unittest

import core_help  # noqa: F401  (finds the package)

from dlrover_ckpt import find, sync
from dlrover_ckpt.find import Commit, Disk, Offer
from dlrover_ckpt.pool import Slot, choose, how_many


def slot(index, saved=0, complete=True, pending=False, lent=False):
    return Slot(index, complete, saved, pending, lent)


class Buffers(unittest.TestCase):
    def test_choice(self):
        cases = {
            "an unused one first": ([slot(0, 5), slot(1, 0, False)], False, [(1, False), (0, True)]),
            "the older one": ([slot(0, 5), slot(1, 4), slot(2, 3)], False, [(2, False), (1, False), (0, True)]),
            "views are spared": ([slot(0, 9), slot(1, 2, lent=True), slot(2, 3)], False,
                                 [(2, False), (1, False), (0, True)]),
            "what waits for the disk stays": ([slot(0, 5, pending=True)], False, []),
            "with drop, the oldest that waits": ([slot(0, 5, pending=True), slot(1, 4, pending=True)], True,
                                                 [(1, True), (0, True)]),
            "even then what does not wait is preferred": ([slot(0, 5, pending=True), slot(1, 4)], True, [(1, False), (0, True)]),
        }
        for name, (slots, disk, expected) in cases.items():
            with self.subTest(name):
                self.assertEqual(choose(slots, disk), expected)

    def test_number(self):
        for free, expected in ((0, 0), (99, 0), (100, 1), (333, 1), (334, 2), (500, 3)):
            self.assertEqual(how_many(100, free), expected, free)


def offer(save, step, when, world=2, resize="same"):
    return Offer(save, step, when, world, resize, "seg/l0-0.seg")


class Memory(unittest.TestCase):
    def test_newest(self):
        a, b = offer("a", 1, 10), offer("b", 2, 20)
        cases = {
            "the newest that all have": ([[a, b], [a, b]], 2, ("b", 2, 20)),
            "not what one lacks": ([[a, b], [a]], 2, ("a", 1, 10)),
            "nothing in common": ([[a], [b]], 2, None),
            "nothing at all": ([[], []], 2, None),
            "another world size": ([[a], [a]], 3, None),
            "any world size": ([[offer("c", 1, 1, 4, "any")]], 1, ("c", 1, 1)),
            "the last saved, after going back": ([[offer("c", 20, 5), offer("d", 12, 6)]] * 2, 2, ("d", 12, 6)),
        }
        for name, (ranks, world, expected) in cases.items():
            with self.subTest(name):
                self.assertEqual(find.newest_in_memory(ranks, world), expected)


class OnDisk(unittest.TestCase):
    def test_order(self):
        c = [Commit(30, "c", 300, 299), Commit(20, "b", 200, 199), Commit(10, "a", 100, 99)]
        for name, disk, expected in (("newest first", Disk(c, 30, 0), [30, 20, 10]),
                                     ("a tracker that lags", Disk(c, 20, 0), [30, 20, 10]),
                                     ("a tracker set by hand", Disk(c, 20, 999), [20, 10]),
                                     ("set to what is not there", Disk(c, 5, 999), [30, 20, 10])):
            with self.subTest(name):
                self.assertEqual([x.step for x in find.on_disk([disk])], expected)
        self.assertEqual([x.step for x in find.on_disk([Disk(c, 30, 0), Disk(c[1:], 20, 0)])], [20, 10])

    def test_overtaken(self):
        c = [Commit(5, "c", 300, 299), Commit(9, "a", 299, 80), Commit(7, "b", 299, 90)]
        self.assertEqual([x.save for x in find.on_disk([Disk(c, 5, 0)])], ["c", "b", "a"])

    def test_memory_or_disk(self):
        disk = [Commit(5, "d", 200, 100), Commit(10, "e", 90, 80)]
        cases = {
            "saved later, with a lower step": ([[offer("m", 3, 101)]], ("m", 3, 101), True),
            "saved before, with a higher step": ([[offer("m", 7, 99)]], ("m", 7, 99), False),
            "the same": ([[offer("d", 5, 99)]], ("d", 5, 99), True),
            "one that is older on disk": ([[offer("e", 10, 120)]], ("e", 10, 120), False),
            "a clock that is ahead": ([[offer("m", 7, 99)], [offer("m", 7, 150)]], ("m", 7, 150), False),
            "none": ([[]], None, False),
        }
        for name, (ranks, memory, expected) in cases.items():
            with self.subTest(name):
                self.assertEqual(find.prefer_memory(memory, disk, ranks), expected)
        self.assertTrue(find.prefer_memory(("m", 3, 1), [], [[]]))

    def test_distrust(self):
        moved = Disk([], 10, 500)
        self.assertTrue(find.distrust(moved, 20, 400))
        self.assertFalse(find.distrust(moved, 20, 600))
        self.assertFalse(find.distrust(moved, 10, 400))
        self.assertTrue(find.distrust(moved, 5, 400))
        self.assertFalse(find.distrust(Disk([], 10, 0), 20, 400))

    def test_moved(self):
        second = 10**9
        self.assertEqual(find.moved(10, 100 * second, 99 * second), 0)
        self.assertEqual(find.moved(10, 200 * second, 99 * second), 200 * second)
        self.assertEqual(find.moved(10, 200, 0), 200)
        self.assertEqual(find.moved(None, 200, 0), 0)

    def test_retention(self):
        ms = [{"step": s} for s in (50, 40, 30, 20, 10)]
        for policy, tracked, expected in (({}, 50, []), ({"keep_latest": 2}, 50, [30, 20, 10]),
                                          ({"keep_latest": 2}, 20, [30, 10]), ({"keep_interval": 20}, 50, [30, 10])):
            self.assertEqual(sync.drop(ms, policy, tracked), expected)


if __name__ == "__main__":
    unittest.main()
