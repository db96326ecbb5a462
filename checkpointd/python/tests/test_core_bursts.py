"""Many saves at once, and several checkpoint directories in one process."""

import logging
import os
import struct
import threading
import time
import unittest
from unittest import mock

import core_help  # noqa: F401  (finds the package)
import test_core_engine as core
from core_help import Case

from dlrover_ckpt import pool, segment
from dlrover_ckpt.engine import Engine, StorageType
from dlrover_ckpt.image import raw
from dlrover_ckpt.notices import Dropped
from dlrover_ckpt.pool import NoRoom, Pool

MEMORY, DISK = core.MEMORY, core.DISK
GRAIN = 2 << 20
FILLS = GRAIN - GRAIN // 32  # bytes of a save that takes a buffer of GRAIN


def settle(path, seq=None):
    """What the daemon writes when a shard is durable."""
    with open(path, "r+b") as f:
        if seq is None:
            f.seek(24)
            seq = struct.unpack("<Q", f.read(8))[0]
        f.seek(112)
        f.write(struct.pack("<QQ", seq, seq))


class Pools(Case):
    def pool(self, free=lambda _: 1 << 40):
        os.makedirs(os.path.join(self.top, "r", "seg"), exist_ok=True)
        p = Pool(os.path.join(self.top, "r"), 0, 1, free)
        self.addCleanup(p.close)
        return p

    def save(self, p, dir="/a", disk=False, need=8192, step=1, **options):
        b = p.acquire(need, disk, dir, **options)
        if b is None:
            return None
        b.begin()
        meta = ('{"save":"","dir":"%s"}' % dir).encode()
        b.publish(step, disk, 10, b"", meta)
        p.release(b)
        return b

    def held(self, p):
        """{directory: steps, the newest last} as the headers say."""
        out = {}
        for b in p.buffers:
            h, meta = segment.read_save(b.fd) if b.fd >= 0 else (None, None)
            if meta:
                out.setdefault(meta["dir"], []).append((h.saved_ns, h.step))
        return {d: [s for _, s in sorted(x)] for d, x in out.items()}

    def limited(self, total):
        """Free bytes of a file system of this size."""
        seg = os.path.join(self.top, "r", "seg")
        return lambda _: total - sum(os.path.getsize(os.path.join(seg, n)) for n in os.listdir(seg))

    def test_each_directory_has_its_own(self):
        p = self.pool()
        for step in (1, 2, 3, 4):
            for d in "abcd":
                self.save(p, "/" + d, step=step)
        self.assertEqual(self.held(p), {"/" + d: [2, 3, 4] for d in "abcd"})
        seg = os.path.join(self.top, "r", "seg")
        self.assertEqual([os.path.getsize(os.path.join(seg, n)) for n in os.listdir(seg)], 12 * [64 << 10])

    def test_disk_saves_of_one_leave_the_other_alone(self):
        p = self.pool()
        for step in range(5):
            self.save(p, "/b", True, step=step)
        self.assertIsNotNone(self.save(p, "/a"))

    def test_the_next_process_finds_them(self):
        p = self.pool()
        for step in (1, 2):
            for d in "ab":
                self.save(p, "/" + d, step=step)
        names = sorted(os.listdir(os.path.join(self.top, "r", "seg")))
        with open(os.path.join(self.top, "r", "seg", "l0-9.seg.new"), "wb"):
            pass  # of a process that was killed
        p.close()
        q = self.pool()
        self.assertEqual(self.held(q), {"/a": [1, 2], "/b": [1, 2]})
        self.save(q, "/a", step=3)
        self.assertEqual(self.held(q), {"/a": [1, 2, 3], "/b": [1, 2]})
        new = set(os.listdir(os.path.join(self.top, "r", "seg"))) - set(names)
        self.assertEqual(new, {"l0-5.seg"}, "a name of its own")

    def test_what_is_damaged_goes(self):
        p = self.pool()
        b = self.save(p)
        with open(b.path, "r+b") as f:
            f.write(b"nonsense")
        p.close()
        with self.assertLogs("dlrover.ckpt", "WARNING"):
            q = self.pool()
        self.assertEqual((q.buffers, os.path.exists(b.path)), ([], False))

    def test_a_torn_save_is_free_for_any(self):
        p = self.pool()
        self.save(p, "/a")
        b = p.acquire(8192, False, "/a")
        b.begin()
        p.release(b)
        p.close()
        q = self.pool()
        self.assertEqual(self.save(q, "/b").path, b.path)
        self.assertEqual(self.held(q), {"/a": [1], "/b": [1]})

    def test_little_memory(self):
        """Of other directories first the oldest saves go, never the newest; then there is no room, with the sizes."""
        os.makedirs(os.path.join(self.top, "r", "seg"))
        p = self.pool(self.limited(10 * GRAIN - 4096))
        for step in (1, 2, 3):
            self.save(p, "/a", step=step, need=FILLS)
        self.assertEqual(self.held(p), {"/a": [1, 2, 3]})
        with self.assertLogs("dlrover.ckpt", "WARNING") as logs:
            self.save(p, "/b", step=4, need=5 * GRAIN)
        self.assertIn("/a: %d" % (2 * GRAIN), logs.output[0])
        self.assertEqual(self.held(p), {"/a": [2, 3], "/b": [4]})
        with self.assertLogs("dlrover.ckpt", "WARNING"):
            self.save(p, "/c", step=5, need=3 * GRAIN // 2)
        self.assertEqual(self.held(p), {"/a": [3], "/b": [4], "/c": [5]})
        with self.assertRaisesRegex(NoRoom, r"a save of %d bytes .* free .* /a: %d, /b: " % (4 * GRAIN, GRAIN)):
            self.save(p, "/d", need=4 * GRAIN)
        self.assertEqual(self.held(p), {"/a": [3], "/b": [4], "/c": [5]})
        with self.assertLogs("dlrover.ckpt", "WARNING"):
            self.save(p, "/a", step=6, need=FILLS)
        self.assertEqual(self.held(p)["/a"][-1], 6)

    def test_what_an_earlier_process_left_on_disk_makes_way(self):
        os.makedirs(os.path.join(self.top, "r", "seg"))
        p = self.pool(self.limited(3 * GRAIN))
        for d in "ab":
            with self.assertLogs("dlrover.ckpt", "WARNING"):
                self.save(p, "/" + d, need=FILLS, disk=d == "a")
        settle(self.save(p, "/a", True, need=FILLS, drop=True).path)
        p.close()
        with self.assertLogs("dlrover.ckpt", "WARNING"):
            q = self.pool(self.limited(3 * GRAIN))
            self.save(q, "/c", need=3 * GRAIN // 2)
        self.assertEqual(self.held(q), {"/b": [1], "/c": [1]})

    def test_a_burst_is_kept_and_given_back(self):
        p = self.pool()
        with mock.patch("dlrover_ckpt.pool._CALM", 0.01):
            made = [self.save(p, disk=True, step=step) for step in range(pool._MOST)]
            self.assertEqual(len({b.path for b in made}), pool._MOST)
            self.assertIsNone(self.save(p), "a save in memory never waits")
            for b in made:
                settle(b.path)
            p._slimming.join(30)
        self.assertEqual(len(p.buffers), 3)
        self.assertEqual(self.held(p)["/a"][-2:], [pool._MOST - 2, pool._MOST - 1])
        self.assertEqual(len(os.listdir(os.path.join(self.top, "r", "seg"))), 3)

    def test_a_burst_stays_within_the_share(self):
        os.makedirs(os.path.join(self.top, "r", "seg"))
        p = self.pool(self.limited(10 * GRAIN))
        made = [self.save(p, disk=True, need=FILLS) for _ in range(8)]
        self.assertEqual(made.index(None), 6)

    def test_a_full_memory_keeps_the_save_waiting(self):
        p = self.pool()
        with mock.patch("dlrover_ckpt.pool._MOST", 3):
            made = [self.save(p, disk=True) for _ in range(3)]
            asked = []

            def served():
                if not asked:
                    settle(made[1].path)  # the disk is done while the save waits
                asked.append(1)
                return True

            self.assertIs(self.save(p, disk=True, patience=60, served=served), made[1])
            began = time.monotonic()
            self.assertIsNone(self.save(p, disk=True, patience=0.1))
            self.assertGreaterEqual(time.monotonic() - began, 0.1)
            self.assertIsNone(self.save(p, disk=True, patience=600, served=lambda: False), "nobody would free one")
            self.assertIs(self.save(p, disk=True, patience=60, drop=True), made[0], "the oldest")

    def test_memory_is_free_at_once(self):
        """The daemon has the file mapped when it is removed."""
        p = self.pool()
        b = self.save(p)
        fd = os.open(b.path, os.O_RDONLY)
        self.addCleanup(os.close, fd)
        b.remove()
        self.assertEqual(os.fstat(fd).st_blocks, 0)


    def test_a_buffer_is_marked_as_being_made_under_the_guard(self):
        """Else a save that looks for the oldest buffer may pass it by, and drop a newer save."""
        p = self.pool()
        self.save(p)
        b, real, seen = p.use("/a").buffers[1], p.guard, []

        class Guard:
            def __enter__(self):
                seen.append(b.making.locked())
                real.acquire()

            def __exit__(self, *_):
                real.release()

        p.guard = Guard()
        p._make(p.use("/a"), b, GRAIN)
        self.assertEqual((seen, b.making.locked(), b.capacity), ([False, True], False, 2 * GRAIN))


class Engines(core.One):
    daemon, headers = core.WithDaemon.daemon, core.WithDaemon.headers

    def setUp(self):
        super().setUp()
        self.runtime = self.launched()

    def test_a_disk_save_waits_and_says_how_long(self):
        self.daemon()
        e = self.engine()
        with mock.patch("dlrover_ckpt.pool._MOST", 3):
            for step in (1, 2, 3):
                self.save(e, step, DISK)
            seg = os.path.join(self.runtime, "seg", "l0-1.seg")
            threading.Timer(0.2, settle, (seg,)).start()
            with self.assertLogs("dlrover.ckpt", "WARNING") as logs:
                self.save(e, 4, DISK)
        self.assertRegex(logs.output[0], r"step 4 waited \d+\.\d+ s for the disk")
        self.assertEqual(segment.parse_header(open(seg, "rb").read(4096)).step, 4)

    def test_after_its_patience_it_writes_by_itself(self):
        self.daemon(verify={"good": True})
        e = self.engine(save_timeout=0.2)
        with mock.patch("dlrover_ckpt.pool._MOST", 3):
            for step in (1, 2, 3):
                self.save(e, step, DISK)
            with self.assertLogs("dlrover.ckpt", "WARNING") as logs:
                self.save(e, 4, DISK)
        self.assertIn("while training waits", logs.output[-1])
        self.assertEqual(self.loaded(e, "disk"), ("disk", 4, 4.0))

    def test_what_is_dropped_is_named(self):
        self.daemon()
        e = self.engine(drop_superseded=True)
        with self.assertLogs("dlrover.ckpt", "WARNING") as logs:
            for step in range(1, 8):
                self.save(e, step, DISK)
        self.assertEqual(self.named(logs), ["1", "2", "3", "4"])
        self.assertEqual(sorted(h.step for h in self.headers().values()), [5, 6, 7])

    def named(self, logs):
        return [line.split("step ")[1].split()[0] for line in logs.output if "dropped" in line]

    def test_what_is_dropped_for_a_larger_save_is_named(self):
        """Its file makes way for a larger one; the daemon, which may have it open, finds no save in it any more."""
        self.daemon()
        e = self.engine(drop_superseded=True)
        for step in (1, 2, 3):
            self.save(e, step, DISK)
        oldest = os.open(os.path.join(self.runtime, "seg", "l0-0.seg"), os.O_RDONLY)
        self.addCleanup(os.close, oldest)
        with self.assertLogs("dlrover.ckpt", "WARNING") as logs:
            e.save(4, [raw("4/x", bytes(2 * GRAIN))], StorageType.DISK)
        self.assertEqual(self.named(logs), ["1"])
        self.assertEqual(segment.read_header(oldest).state, segment.FREE)

    def test_what_is_not_dropped_in_the_end_is_not_named(self):
        """Only what is overwritten: the daemon commits the rest. And nothing is named twice."""
        self.daemon()
        e = self.engine(drop_superseded=True)
        for step in (1, 2, 3):
            self.save(e, step, DISK)
        with self.assertLogs("dlrover.ckpt", "WARNING") as logs:
            with mock.patch.object(e, "_has_daemon", side_effect=RuntimeError("a rank has died")):
                self.assertRaises(RuntimeError, self.save, e, 4, DISK)
            self.assertEqual(self.named(logs), [])
            self.assertTrue(self.headers()["l0-0.seg"].pending)
            with mock.patch("dlrover_ckpt.copying._run", side_effect=RuntimeError("boom")):
                self.assertRaises(RuntimeError, self.save, e, 5, DISK)
            self.save(e, 6, DISK)
            self.save(e, 7, DISK)
        self.assertEqual(self.named(logs), ["1", "2"])

    def test_a_job_names_each_dropped_save_once(self):
        out = self.world("""
            import logging
            from dlrover_ckpt.engine import Engine, StorageType
            from dlrover_ckpt.image import raw
            logging.basicConfig(stream=sys.stdout, format="%(message)s")
            e = Engine(dir, "x", shard=rank, shards=2, primary=True, drop_superseded=True)
            e._has_daemon = lambda: True
            for step in (1, 2, 3, 4, 5):
                e.save(step, [raw("%d/%d" % (step, rank), b"x" * 100)], StorageType.DISK)
            dist.barrier()
        """)
        lines = [line for text in out for line in text.splitlines() if "dropped" in line]
        self.assertEqual([line.split()[1] for line in lines], ["1", "2"], out)

    def test_ranks_that_drop_a_save_one_after_the_other(self):
        save = segment.Pending("0123", 7)
        for rank, lines in ((0, 0), (1, 1)):
            dropped = Dropped(rank)
            with self.assertLogs("dlrover.ckpt", "WARNING") as logs:
                logging.getLogger("dlrover.ckpt").warning("of the test")
                dropped.name([(1, save)], 8)
                dropped.name([(0, save), (1, save)], 9)
            self.assertEqual(len(logs.output) - 1, lines)

    def test_no_room_is_said_once_for_each_directory(self):
        e = self.engine()
        other = Engine(self.dir + "2", "ddp", shard=0, shards=1, primary=True, resize="any")
        e._pool._free = lambda _: 1000
        with self.assertLogs("dlrover.ckpt", "WARNING") as logs:
            for step in (1, 2):
                for one in (e, other):
                    self.assertFalse(one.save(step, [raw("x", bytes(9000))], MEMORY))
        self.assertEqual(len(logs.output), 2)


class Arguments(core.One):
    def test_steps(self):
        import numpy

        e = self.engine()
        for step in (7.5, "7", True, None):
            with self.assertRaisesRegex(TypeError, "step must be an integer, not %r" % (step,)):
                e.save(step, [], MEMORY)
        for step in (-1, 2 ** 63):
            with self.assertRaisesRegex(ValueError, "from 0 to"):
                e.save(step, [], MEMORY)
        for step in (0, 2 ** 63 - 1, numpy.int32(7)):
            self.assertTrue(self.save(e, step))
            self.assertEqual(e.load().step, step)
        self.save(e, 2 ** 63 - 1, DISK)
        self.assertEqual(self.loaded(e, "disk")[1], 2 ** 63 - 1)

    def test_directories(self):
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
        from dlrover_ckpt.adapter import Checkpointer

        for make in (DdpCheckpointer, lambda d: Checkpointer(d, "x"),
                     lambda d: Engine(d, "ddp", shard=0, shards=1, primary=True)):
            with self.assertRaisesRegex(ValueError, "empty"):
                make("")
            with mock.patch.dict(os.environ, HOME=self.top):
                make("~/here")
            self.assertTrue(os.path.isdir(self.top + "/here"))
            os.rmdir(self.top + "/here")


if __name__ == "__main__":
    unittest.main()
