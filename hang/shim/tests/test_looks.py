"""What the looks at the process groups add up to, on a clock of the test."""

import unittest

from help import Case, FAKE, HERE, SHIM
from _dlrover_hang import looks, page

SLOT = page.GROUPS


class Group:
    def __init__(self):
        self.seq = 7

    def _get_sequence_number_for_group(self):
        return self.seq


class Groups:
    def __init__(self, *groups):
        self.active = tuple((SLOT + 3 * i, lambda g=g: g) for i, g in enumerate(groups))


class Rank:
    """A rank that makes steps. Its collectives begin at given shares of a step; looks are taken at random moments."""

    def __init__(self, groups=1):
        self.memory = bytearray(page.SIZE)
        self.words = memoryview(self.memory).cast("Q")
        self.groups = [Group() for _ in range(groups)]
        self.looks = looks.Looks(self.words, Groups(*self.groups))
        self.looks._seed = 1
        self.now = self.looks._began = 10**12
        self.due = 0

    def step(self, took, *begins):
        """begins: when collectives of the groups begin, as shares of a step of so many ns."""
        began = self.now
        events = sorted((began + int(b * took), g) for g, bs in zip(self.groups, begins) for b in bs)
        end = began + took
        while self.due < end:
            while events and events[0][0] <= self.due:
                events.pop(0)[1].seq += 1
            if self.due >= began:
                self.looks.look(self.due)
            self.due = max(self.due, began)
            self.due += int(self.looks.pause(self.due) * 1e9)
        for _, g in events:
            g.seq += 1
        self.now = end
        n = self.words[page.STEPS]
        self.words[page.STEP_RING + n % page.STEP_SLOTS] = end
        self.words[page.STEPS] = n + 1
        self.looks.step(end)

    def sums(self, slot=0):
        a, b = self.words[page.SUMS + 2 * slot], self.words[page.SUMS + 2 * slot + 1]
        n = a >> 32
        return n, (a & (1 << 32) - 1) / n / 65536 - 1, (b >> 32) / n / 65536, (b & 65535) / n / 64


class Sums(unittest.TestCase):
    def test_positions(self):
        """One collective, late or early in steps shorter and longer than the time between looks."""
        for took in (10**7, 10**8, 10**9):
            for begin in (0.2, 0.5, 0.9):
                r = Rank()
                for _ in range(600 if took < 10**9 else 100):
                    r.step(took, [begin])
                n, mean, square, full = r.sums()
                self.assertGreater(n, 30)
                self.assertAlmostEqual(mean, 0.5 - begin, delta=0.15 if took == 10**7 else 0.05)
                self.assertAlmostEqual(full, 1 - begin, delta=0.25 if took == 10**7 else 0.1)
                if took == 10**7:
                    self.assertAlmostEqual(square - mean * mean, 1 / 12, delta=0.04)

    def test_several_groups(self):
        r = Rank(3)
        for _ in range(200):
            r.step(10**8, [0.1, 0.2, 0.3, 0.4], [0.9], [])
        self.assertGreater(r.sums(0)[1], r.sums(1)[1] + 0.3)
        self.assertEqual(r.words[page.SUMS + 4], 0, "no collective in any step")

    def test_unusual_steps_do_not_count(self):
        r = Rank()
        for i in range(200):
            r.step(10**8 if i % 10 else 20**9, [0.5])
        counted = r.sums()[0]
        self.assertGreater(counted, 100)
        self.assertLess(counted, 181)

    def test_late_looks_stand_for_those_that_could_not_be(self):
        r = Rank()
        for _ in range(20):
            r.step(10**6, [0.5])
        r.looks._due = r.now + 2 * 10**6
        r.step(10**6, [0.5])
        began = r.now
        r.looks._due = began + 10**8
        r.looks.look(began + 10**9)  # stopped for 0.9 s, before its collective
        self.assertEqual(r.looks._step.looks, [(10, 10 * (10**9 - 45 * 10**7), [28])])

    def test_steps_without_a_look_read_nothing(self):
        r = Rank()
        for _ in range(40):
            r.step(10**7, [0.5])
        read = []
        group = r.groups[0]
        group._get_sequence_number_for_group = lambda: read.append(1) or group.seq
        for _ in range(1000):
            r.step(10**7, [0.5])
        self.assertLess(len(read), 600)
        self.assertGreater(r.sums()[0], 90)

    def test_groups_that_are_gone_or_fail(self):
        r = Rank()
        r.step(10**8, [0.5])
        gone = r.looks._groups.active[0][0], lambda: None
        r.looks._groups.active = (gone,)
        r.step(10**8, [0.5])
        self.assertIsNone(r.looks._step)

        def fails():
            raise RuntimeError("aborted")
        r.groups[0]._get_sequence_number_for_group = fails
        r.looks._groups.active = ((SLOT, lambda: r.groups[0]),)
        r.looks.step(r.now)
        r.looks.look(r.now)


class Real(Case):
    path = [SHIM, HERE, FAKE]

    def test_a_worker_adds_up_its_looks(self):
        self.run_code("""
            import torch, torch.distributed as dist, help
            g = dist.init_process_group()
            o = torch.optim.Optimizer()
            def train():
                for _ in range(20):
                    time.sleep(0.004); g.seq += 1; time.sleep(0.001); o.step()
                return page().sums
            wait(train)
            wait(lambda: train()[next(iter(page().groups))][0] > 20)
            n, mean, square, full = next(iter(page().sums.values()))
            assert -0.6 < mean < 0.1, page().sums
            assert page().words[15] == 16
        """, WORLD_SIZE="1")


if __name__ == "__main__":
    unittest.main()
