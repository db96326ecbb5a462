"""Segment files: the format, the locks, the space."""

import errno
import fcntl
import os
import random
import re
import time
import unittest
import zlib
from unittest import mock

from core_help import Case

from dlrover_ckpt import segment
from dlrover_ckpt.pool import NoRoom, Pool
from dlrover_ckpt.segment import Buffer, Damaged, Loan, Mapping


class Format(Case):
    def buffer(self, size=1 << 16):
        b = Buffer(os.path.join(self.top, "l0-0.seg"))
        b.take(b.make(size, 0), size)
        self.addCleanup(b.close)
        return b

    def save(self, b, step=7, image=b"image", meta=b'{"save":"0123456789abcdef"}', disk=False):
        self.assertTrue(segment.lock(b.fd, True))
        seq = b.begin()
        b.map().view[4096:4096 + len(image)] = image
        b.publish(step, disk, len(image), bytes(32), meta)
        segment.unlock(b.fd)
        return seq

    def test_a_save_is_read_back(self):
        b = self.buffer()
        self.assertEqual(b.header().state, segment.FREE)
        self.assertEqual([self.save(b), self.save(b, 8, disk=True)], [1, 2])
        h, meta = segment.read_save(b.fd)
        self.assertEqual((h.state, h.seq, h.step, h.disk, h.image_off, h.image_len, h.fix_count, h.pending),
                         (segment.COMPLETE, 2, 8, True, 4096, 5, 1, True))
        self.assertEqual(meta["save"], "0123456789abcdef")
        raw = os.pread(b.fd, 4096, 0)
        self.assertEqual(raw[:8], b"DLRSEG01")
        self.assertEqual(int.from_bytes(raw[128:132], "little"), zlib.crc32(raw[:16] + raw[24:112]))
        self.assertEqual((h.fix_off % 8, h.fix_off), (0, 4096 + 8))

    def test_while_it_is_written_there_is_nothing(self):
        b = self.buffer()
        self.save(b)
        b.begin()
        self.assertEqual(segment.read_save(b.fd)[1], None)
        b.abort()
        self.assertEqual(b.header().state, segment.FREE)

    def test_numbers_go_on_in_a_larger_file(self):
        b = self.buffer()
        self.save(b)
        b.take(b.make(1 << 17, b.seq()), 1 << 17)
        self.assertEqual((b.header().seq, b.header().released, b.capacity), (1, 1, 1 << 17))
        self.assertEqual(self.save(b), 2)

    def test_damage_is_found(self):
        b = self.buffer()
        self.save(b)
        good = os.pread(b.fd, 4096, 0)
        rng = random.Random(1)
        for at in list(range(0, 16)) + [rng.randrange(24, 112) for _ in range(40)]:
            bad = bytearray(good)
            bad[at] ^= 0x55
            with self.assertRaises(Damaged, msg=at):
                segment.parse_header(bytes(bad))
        with self.assertRaises(Damaged):
            segment.parse_meta(b"{}", 1)
        with self.assertRaises(Damaged):
            segment.parse_meta(b"[]", zlib.crc32(b"[]"))

    def test_links_are_refused(self):
        b = self.buffer()
        os.symlink(b.path, b.path + "x")
        with self.assertRaises(OSError):
            segment.open_segment(b.path + "x")

    def test_private_views_become_independent(self):
        b = self.buffer()
        b.map().view[4096:4099] = b"old"
        m = Mapping(b.fd, b.capacity, private=True)
        view, loan = m.view, Loan(m)
        del m
        self.assertFalse(loan.free())
        view[4099] = 1  # never reaches the file
        self.assertEqual(b.map().view[4099], 0)
        if not loan.detach():
            self.skipTest("MAKING VIEWS INDEPENDENT IS NOT TESTED: this kernel has no MADV_POPULATE_WRITE (Linux 5.14 has)")
        b.map().view[4096:4099] = b"new"
        self.assertEqual(bytes(view[4096:4099]), b"old")
        del view
        self.assertTrue(loan.free())


class HugePages(Case):
    SIZE = 9 << 20

    def setUp(self):
        super().setUp()
        self.path = "/dev/shm/dlrover-test-%d.seg" % os.getpid()

    def buffer(self):
        b = Buffer(self.path)
        self.addCleanup(b.remove)
        b.take(b.make(self.SIZE, 0), self.SIZE)
        return b

    def huge(self, b):
        """KiB of the buffer that are mapped in huge pages."""
        start, out = "%x-" % b.map().addr, 0
        with open("/proc/self/smaps") as f:
            mine = False
            for line in f:
                if "-" in line.split()[0]:
                    mine = line.startswith(start)
                elif mine and line.split()[0] in ("ShmemPmdMapped:", "FilePmdMapped:"):
                    out += int(line.split()[1])
        return out

    def test_a_segment_is_made_of_them(self):
        version = tuple(int(n) for n in re.findall(r"\d+", os.uname().release)[:2])
        if version < (6, 1) or not os.path.exists("/sys/kernel/mm/transparent_hugepage"):
            self.skipTest("NO HUGE PAGES TO TEST: Linux %d.%d is too old, or without them" % version)
        with mock.patch("dlrover_ckpt.segment._HUGE_PATIENCE", 60):
            b = self.buffer()
        self.assertTrue(b.populate(lambda: False))
        self.assertEqual(self.huge(b), 8 << 10)
        self.assertEqual(os.stat(self.path).st_blocks * 512, self.SIZE)

    def test_without_them_it_is_whole_as_well(self):
        for refuse in (mock.patch.object(Mapping, "collapse", return_value=False),
                       mock.patch("dlrover_ckpt.segment._HUGE_PATIENCE", 0)):
            with refuse:
                b = self.buffer()
            self.assertEqual(os.stat(self.path).st_blocks * 512, self.SIZE)
            b.remove()

    def test_no_memory(self):
        with mock.patch("os.pwrite", side_effect=OSError(errno.ENOSPC, "full")):
            with self.assertRaises(OSError):
                Buffer(self.path).make(self.SIZE, 0)
        self.assertFalse(os.path.exists(self.path + ".new"))

    def test_every_mapping_starts_at_one(self):
        b = self.buffer()
        for private in (False, True):
            m = Mapping(b.fd, self.SIZE, private)
            self.assertEqual(m.addr % (2 << 20), 0)
            self.assertEqual(len(m.view), self.SIZE)


class Directory(Case):
    def test_without_a_launcher_the_parent_names_it(self):
        env = {"DLROVER_CKPT_SHM": self.shm}
        path, launched = segment.runtime_dir(env)
        self.assertFalse(launched)
        parent, _, namespace = os.path.basename(path).split("-")
        self.assertEqual(parent, "t%d" % os.getppid())
        dead = os.path.join(os.path.dirname(path), "t%d-1-%s" % (os.getpid(), namespace))
        os.mkdir(dead)
        self.assertEqual(segment.runtime_dir(env)[0], path)
        self.assertFalse(os.path.exists(dead))

    def test_workers_of_another_pid_namespace(self):
        env = {"DLROVER_CKPT_SHM": self.shm}
        base = os.path.dirname(segment.runtime_dir(env)[0])
        old = time.time() - 7200
        cases = {"t1-1-7": None, "t2-1-7": old, "t3-1-7": old}  # just started, over, and at work for long
        for name, when in cases.items():
            os.mkdir(os.path.join(base, name))
            if when:
                os.utime(os.path.join(base, name), (when, when))
        worker = os.open(os.path.join(base, "t3-1-7"), os.O_RDONLY)
        self.addCleanup(os.close, worker)
        fcntl.flock(worker, fcntl.LOCK_SH)
        segment.runtime_dir(env)
        self.assertEqual([n for n in sorted(os.listdir(base)) if n in cases], ["t1-1-7", "t3-1-7"])

    def test_what_others_could_write_is_refused(self):
        base = os.path.join(self.shm, "dlrover-%d" % os.getuid())
        os.mkdir(base, 0o700)
        os.chmod(base, 0o777)
        with self.assertRaises(PermissionError):
            segment.runtime_dir({"DLROVER_CKPT_SHM": self.shm})
        os.rmdir(base)
        os.symlink(self.top, base)
        with self.assertRaises(PermissionError):
            segment.runtime_dir({"DLROVER_CKPT_SHM": self.shm})


class Pools(Case):
    def pool(self, free=1 << 40, holders=1):
        os.makedirs(os.path.join(self.top, "r", "seg"), exist_ok=True)
        p = Pool(os.path.join(self.top, "r"), 0, holders, lambda _: free)
        self.addCleanup(lambda: [b.close() for b in p.buffers])
        return p

    def save(self, p, need=8192, disk=False, step=1):
        b = p.acquire(need, disk)
        if b is None:
            return None
        b.begin()
        b.publish(step, disk, 10, b"", b'{"save":""}')
        p.release(b)
        return int(b.path[-5])

    def test_rotation(self):
        p = self.pool()
        self.assertEqual([self.save(p) for _ in range(5)], [0, 1, 2, 0, 1])

    def test_what_the_disk_wants_stays(self):
        p = self.pool()
        self.assertEqual(self.save(p, disk=True), 0)
        self.assertEqual([self.save(p) for _ in range(4)], [1, 2, 1, 2])
        self.assertEqual([self.save(p, disk=True) for _ in range(2)], [1, 2])
        with mock.patch("dlrover_ckpt.pool._MOST", 3):
            self.assertIsNone(self.save(p))
            self.assertIsNone(self.save(p, disk=True))

    def test_locked_by_a_reader(self):
        p = self.pool()
        self.save(p)
        reader = self.child("""
            import fcntl
            f = open(top + "/r/seg/l0-0.seg", "rb")
            fcntl.lockf(f, fcntl.LOCK_SH)
            print("locked", flush=True)
            sys.stdin.read()
        """)
        self.assertEqual(reader.stdout.readline().strip(), "locked")
        self.assertEqual([self.save(p) for _ in range(4)], [1, 2, 1, 2])

    def test_little_memory(self):
        with self.assertLogs("dlrover.ckpt", "WARNING"):
            p = self.pool(free=5 << 20)
            self.assertEqual([self.save(p, 2 << 20) for _ in range(2)], [0, 0])
        with self.assertRaises(NoRoom):
            p.acquire(1 << 30, True)
        with self.assertRaises(NoRoom):
            self.pool(free=5 << 20, holders=2).acquire(8 << 20, False)

    def test_a_full_file_system(self):
        p = self.pool()
        with mock.patch("os.posix_fallocate", side_effect=OSError(errno.ENOSPC, "full")):
            with self.assertRaises(NoRoom):
                p.acquire(8192, True)
        self.assertEqual(self.save(p), 0)
        self.assertEqual(os.listdir(os.path.join(self.top, "r", "seg")), ["l0-0.seg"])

    def test_segments_of_an_earlier_process_are_used_again(self):
        p = self.pool()
        self.save(p)
        inode = os.stat(p.buffers[0].path).st_ino
        for b in p.buffers:
            b.close()
        q = self.pool()
        self.assertEqual(self.save(q), 1)
        self.assertEqual(os.stat(q.buffers[0].path).st_ino, inode)

    def test_preparation(self):
        p = self.pool()
        p.prepare(3 << 20)
        self.assertTrue(p.prepared(30))
        self.assertEqual(len(p.buffers), 3)
        self.assertTrue(all(b.ready and b.capacity >= 3 << 20 for b in p.buffers))
        inodes = [os.stat(b.path).st_ino for b in p.buffers]
        self.assertEqual([self.save(p, 3 << 20) for _ in range(3)], [0, 1, 2])
        self.assertEqual([os.stat(b.path).st_ino for b in p.buffers], inodes)

    def test_buffers_do_not_grow_with_every_process(self):
        p, sizes = self.pool(), []
        for need in [8192, 8192, 8192, 8 << 20, 8192, 8192, 8192, 8192]:
            b = p.acquire(need, False, "/d")
            b.begin()
            b.publish(1, False, 10, b"", b'{"save":"","dir":"/d"}')
            p.release(b)
            p.close()
            p = self.pool()
            p.renew("/d")
            self.assertTrue(p.prepared(30))
            sizes.append(max(b.capacity for b in p.buffers))
        self.assertEqual([b.capacity for b in p.buffers], [sizes[3]] * 3)

    def test_a_save_during_the_preparation(self):
        p = self.pool()
        p.prepare(64 << 20)
        self.assertIsNotNone(self.save(p, 1 << 20))
        self.assertTrue(p.prepared(30))

    def test_a_larger_save(self):
        p = self.pool()
        [self.save(p) for _ in range(3)]
        self.assertEqual(self.save(p, 8 << 20), 0)
        self.assertGreaterEqual(p.buffers[0].capacity, 8 << 20)
        self.assertEqual(p.buffers[0].header().seq, 2)


if __name__ == "__main__":
    unittest.main()
