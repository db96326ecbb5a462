"""The engine in one process, and what survives the process."""

import errno
import json
import os
import shutil
import signal
import socket
import stat
import threading
import time
from unittest import mock

from core_help import Case

import torch

from dlrover_ckpt import inline, pool, saveid, segment, sync
from dlrover_ckpt.engine import Engine, StorageType
from dlrover_ckpt.image import raw, torch_load, torch_zip
from dlrover_ckpt.sync import SaveFailed

MEMORY, DISK = StorageType.MEMORY, StorageType.DISK


class Strategy:
    def __init__(self, rule):
        self.rule = rule

    def retention(self):
        return self.rule


class One(Case):
    def engine(self, **options):
        options = dict(dict(shard=0, shards=1, primary=True, resize="any"), **options)
        return Engine(self.dir, "ddp", **options)

    def save(self, e, step, storage_type=MEMORY, value=None, path=None):
        state = {"w": torch.full((1000,), float(step if value is None else value)), "step": step}
        return e.save(step, [torch_zip(path or "%d/rank_0.pt" % step, state)], storage_type)

    def loaded(self, e, want="memory-first"):
        """(source, step, value) of what is loaded."""
        got = e.load(want)
        if got is None:
            return None
        if got.source == "memory":
            (view,) = got.files.values()
            state = torch_load(view)
        else:
            state = torch.load(os.path.join(got.dir, got.manifest["files"][0]["path"]))
        self.assertEqual(state["step"], got.step)
        return got.source, got.step, float(state["w"][0])


class Memory(One):
    def test_save_and_load(self):
        e = self.engine()
        self.assertIsNone(e.load())
        for step in range(1, 6):
            self.assertTrue(self.save(e, step))
        self.assertEqual(e.latest_step, 5)
        self.assertEqual(self.loaded(e), ("memory", 5, 5.0))
        self.assertEqual(os.listdir(self.dir), [])

    def test_several_files(self):
        e = self.engine()
        w = torch.arange(1 << 19)
        images = [torch_zip("1/a.pt", {"w": w}), raw("1/b.json", b"{}"), torch_zip("1/c.pt", {"w": w[:7]})]
        e.save(1, images, MEMORY)
        e.save(2, [raw("2/b.json", b"[1]"), torch_zip("2/a.pt", {"w": w + 1})], MEMORY)
        files = e.load().files
        self.assertEqual(bytes(files["2/b.json"]), b"[1]")
        self.assertTrue(torch.equal(torch_load(files["2/a.pt"])["w"], w + 1))

    def test_views_do_not_change_with_later_saves(self):
        e = self.engine()
        self.save(e, 1)
        got = torch_load(e.load().files["1/rank_0.pt"])
        for step in range(2, 9):
            self.save(e, step)
        self.assertTrue(bool((got["w"] == 1).all()))
        got["w"].fill_(0)
        self.assertEqual(self.loaded(e), ("memory", 8, 8.0))

    def test_a_step_that_is_saved_again_has_another_id(self):
        counts = saveid.StepCounts()
        with mock.patch("dlrover_ckpt.saveid._REMEMBERED", 10):
            seen = set()
            for step in list(range(30)) + [29, 28, 3] + list(range(4, 60)) + [3]:
                once = step, counts.next(step)
                self.assertNotIn(once, seen)
                seen.add(once)
            self.assertEqual(len(counts._counts), 10)
            self.assertEqual(counts.next(100), 1)

    def test_bad_type(self):
        with self.assertRaises(ValueError):
            self.engine().save(1, [], 2)
        with self.assertRaises(ValueError):
            self.engine().load("nowhere")

    def test_a_failed_copy_leaves_the_last_save(self):
        e = self.engine()
        self.save(e, 1)
        with mock.patch("dlrover_ckpt.copying._run", side_effect=RuntimeError("boom")):
            with self.assertRaises(RuntimeError):
                self.save(e, 2)
        self.assertEqual(self.loaded(e), ("memory", 1, 1.0))
        self.assertTrue(self.save(e, 3))

    def test_reused_buffers_hold_nothing_old(self):
        e = self.engine()
        for step in range(1, 4):
            e.save(step, [raw("x", b"\xff" * 9000)], MEMORY)
        img = raw("x", b"ab")
        img.length, img.pieces = 9000, [(10, b"ab"), (8000, b"cd")]
        for step in range(4, 7):
            e.save(step, [img], MEMORY)
        got = bytes(e.load().files["x"])
        self.assertEqual(got, bytes(10) + b"ab" + bytes(7988) + b"cd" + bytes(998))

    def test_what_is_not_ours_is_not_loaded(self):
        self.save(self.engine(), 1)
        self.assertIsNone(Engine(self.dir, "fsdp", shard=0, shards=1, primary=True, resize="any").load())
        self.assertIsNone(Engine(self.dir + "2", "ddp", shard=0, shards=1, primary=True, resize="any").load())
        self.assertIsNone(self.engine(shard=1, shards=2).load())

    def test_a_directory_that_was_made_anew(self):
        e = self.engine()
        self.save(e, 1)
        os.rename(self.dir, self.dir + ".old")
        os.mkdir(self.dir)
        with self.assertLogs("dlrover.ckpt", "ERROR") as logs:
            self.assertIsNone(self.engine().load())
        self.assertIn("earlier", logs.output[-1])

    def test_a_rank_that_holds_nothing_reads_its_neighbours(self):
        self.save(self.engine(), 3)
        os.environ.update(LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
        e = self.engine(holder=False, primary=False)
        self.assertTrue(self.save(e, 4, MEMORY))
        self.assertEqual(self.loaded(e), ("memory", 3, 3.0))

    def test_without_agreement_only_the_disk_counts(self):
        e = self.engine()
        self.save(e, 1, DISK)
        self.save(e, 2)
        os.environ["WORLD_SIZE"] = "2"
        with self.assertLogs("dlrover.ckpt", "WARNING") as logs:
            self.assertEqual(self.loaded(self.engine()), ("disk", 1, 1.0))
        self.assertIn("torch.distributed", logs.output[-1])


class Disk(One):
    def test_vanished_storage(self):
        e = self.engine()
        self.save(e, 1, DISK)
        os.rename(self.dir, self.dir + ".away")
        os.mkdir(self.dir)
        with self.assertRaisesRegex(SaveFailed, "mount it, or make"):
            self.save(e, 2, DISK)
        self.assertEqual(os.listdir(self.dir), [])
        os.rmdir(self.dir)
        os.rename(self.dir + ".away", self.dir)
        self.save(e, 3, DISK)
        self.assertEqual(e.wait(3, 10), 3)

    def test_commit(self):
        e = self.engine()
        e.save(5, [torch_zip("5/rank_0.pt", {"w": torch.ones(3)}), raw("5/note", b"hi")], DISK,
               [("latest", "step5")])
        self.assertEqual(e.wait(), 5)
        m = sync.manifest(self.dir, 5)
        self.assertEqual([f["path"] for f in m["files"]], ["5/rank_0.pt", "5/note"])
        self.assertEqual(sync.verify(self.dir, m), "")
        self.assertEqual(open(self.dir + "/latest").read() + open(self.dir + "/dlrover_latest.txt").read(), "step55")
        self.assertEqual(sorted(os.listdir(self.dir + "/5")), ["note", "rank_0.pt"])
        self.assertEqual(os.listdir(self.dir + "/.dlrover/stage"), [])

    def test_a_file_system_that_cannot_sync_directories(self):
        def fsync(fd, real=os.fsync):
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                raise OSError(refused, "refused")
            real(fd)

        e = self.engine()
        with mock.patch("os.fsync", fsync):
            for step, refused in enumerate((errno.EINVAL, errno.ENOTSUP), 1):
                self.save(e, step, DISK)
            refused = errno.EIO
            with self.assertRaisesRegex(SaveFailed, "refused"):
                self.save(e, 3, DISK)
        self.assertEqual(self.loaded(e, "disk"), ("disk", 2, 2.0))

    def test_newest_of_memory_and_disk(self):
        e = self.engine()
        self.save(e, 1)
        self.save(e, 2, DISK)
        self.assertEqual(self.loaded(e), ("memory", 2, 2.0))
        self.assertEqual(self.loaded(e, "disk"), ("disk", 2, 2.0))
        self.save(e, 3)
        self.assertEqual(self.loaded(e), ("memory", 3, 3.0))

    def test_the_latest_counts_not_the_highest(self):
        e = self.engine()
        self.save(e, 10, DISK)
        self.save(e, 5, DISK)
        self.assertEqual(self.loaded(e, "disk"), ("disk", 5, 5.0))
        self.save(e, 3)
        self.assertEqual(self.loaded(e), ("memory", 3, 3.0))
        self.assertEqual(self.loaded(self.engine()), ("memory", 3, 3.0))

    def test_a_clock_that_is_behind(self):
        ahead = time.time_ns() + 3600 * 10**9
        with mock.patch("time.time_ns", return_value=ahead):  # that of another node
            self.save(self.engine(), 1, DISK)
        for b in list(pool._pools.values())[-1].buffers:
            b.remove()
        saveid._latest.clear()
        e = self.engine()
        self.assertEqual(self.loaded(e), ("disk", 1, 1.0))
        self.save(e, 2)
        self.assertEqual(self.loaded(e), ("memory", 2, 2.0))

    def test_a_damaged_step_is_passed_over(self):
        e = self.engine()
        for step in (1, 2, 3):
            self.save(e, step, DISK)
        with open(self.dir + "/3/rank_0.pt", "r+b") as f:
            f.seek(300)
            f.write(b"?")
        os.truncate(self.dir + "/2/rank_0.pt", 100)
        with self.assertLogs("dlrover.ckpt", "WARNING") as logs:
            self.assertEqual(self.loaded(e, "disk"), ("disk", 1, 1.0))
        self.assertIn("checksum", logs.output[-1])
        os.remove(self.dir + "/1/rank_0.pt")
        with self.assertLogs("dlrover.ckpt", "ERROR"):
            self.assertIsNone(self.loaded(e, "disk"))

    def test_damaged_records(self):
        e = self.engine()
        self.save(e, 1, DISK)
        self.save(e, 2, DISK)
        for name, data in (("/.dlrover/2.json", b"{"), ("/dlrover_latest.txt", b"")):
            with open(self.dir + name, "wb") as f:
                f.write(data)
        with self.assertLogs("dlrover.ckpt", "WARNING"):
            self.assertEqual(self.loaded(e, "disk"), ("disk", 1, 1.0))

    def test_a_tracker_set_by_hand(self):
        e = self.engine()
        for step in (1, 2):
            self.save(e, step, DISK)
        self.save(e, 3)
        tracker = self.dir + "/dlrover_latest.txt"
        with open(tracker, "w") as f:
            f.write("1")
        later = time.time() + 60
        os.utime(tracker, (later, later))
        with self.assertLogs("dlrover.ckpt", "WARNING") as logs:
            self.assertEqual(self.loaded(e)[1:], (1, 1.0))
        self.assertIn("tracker", logs.output[-1])

    def test_a_checkpoint_of_another_program(self):
        os.makedirs(self.dir + "/7")
        torch.save({"w": torch.full((1000,), 7.0), "step": 7}, self.dir + "/7/rank_0.pt")
        with open(self.dir + "/dlrover_latest.txt", "w") as f:
            f.write("7")
        self.assertEqual(self.loaded(self.engine()), ("disk", 7, 7.0))

    def test_saving_a_step_again(self):
        e = self.engine()
        self.save(e, 1, DISK)
        self.save(e, 1, DISK, value=9)
        self.assertEqual(self.loaded(e, "disk"), ("disk", 1, 9.0))
        with mock.patch("dlrover_ckpt.sync.write_image", side_effect=OSError("no space")):
            with self.assertRaises(SaveFailed):
                self.save(e, 1, DISK, value=10)
        self.assertEqual(self.loaded(e, "disk"), ("disk", 1, 9.0))
        self.assertEqual(os.listdir(self.dir + "/.dlrover/stage"), [])

    def test_retention(self):
        e = self.engine(deletion_strategy=Strategy({"keep_latest": 2}))
        for step in range(1, 5):
            self.save(e, step, DISK)
        self.assertEqual(sorted(os.listdir(self.dir)), [".dlrover", "3", "4", "dlrover_latest.txt"])

    def test_retention_spares_a_path_that_is_used_again(self):
        e = self.engine(deletion_strategy=Strategy({"keep_latest": 1}))
        for step in range(1, 4):
            self.save(e, step, DISK, path="same.pt")
        self.assertEqual(self.loaded(e, "disk"), ("disk", 3, 3.0))

    def test_a_strategy_of_ones_own(self):
        class Own(Strategy):
            def clean_up(self, step, delete):
                delete(os.path.join(top, str(step)))

        top = self.dir
        e = self.engine(deletion_strategy=Own(None))
        for step in range(1, 4):
            self.save(e, step, DISK)
        self.assertEqual(sorted(os.listdir(self.dir)), [".dlrover", "3", "dlrover_latest.txt"])
        self.assertEqual([m["step"] for m in sync.manifests(self.dir)[0]], [3])

    def test_paths_that_leave_the_directory(self):
        for path in ("../x", "a/../../x", ".dlrover/x", ".", "a//b"):
            with self.assertRaises(SaveFailed, msg=path):
                self.engine().save(1, [raw(path, b"x")], DISK)

    def test_interrupted_commits(self):
        """A save that stops after any of its steps is completed, or leaves no trace; never in between."""
        real = {n: getattr(os, n) for n in ("rename", "unlink", "fsync")}
        for stop in range(0, 60, 3):
            with self.subTest(stop=stop):
                shutil.rmtree(self.dir, True)
                e = self.engine()
                self.save(e, 1, DISK)
                left = [stop]

                def step(name):
                    def call(*args):
                        if left[0] == 0:
                            raise KeyboardInterrupt
                        left[0] -= 1
                        return real[name](*args)
                    return call

                with mock.patch.multiple(os, **{n: step(n) for n in real}):
                    try:
                        self.save(e, 2, DISK)
                    except KeyboardInterrupt:
                        pass
                found = self.loaded(e, "disk")
                self.assertIn(found, (("disk", 1, 1.0), ("disk", 2, 2.0)))
                self.assertEqual(sync.verify(self.dir, sync.manifest(self.dir, sync.tracked(self.dir))), "")

    def test_no_room_in_memory(self):
        e = self.engine()
        with mock.patch("dlrover_ckpt.segment.free_bytes", return_value=1000):
            e._pool._free = segment.free_bytes
            self.assertFalse(self.save(e, 1, MEMORY))
            self.assertTrue(self.save(e, 2, DISK))
        self.assertEqual(self.loaded(e), ("disk", 2, 2.0))

    def test_memory_that_fails_ends_nothing(self):
        stale = OSError(errno.ESTALE, "stale")
        e = self.engine()
        with mock.patch("dlrover_ckpt.segment.Buffer.make", side_effect=stale):
            self.assertFalse(self.save(e, 1, MEMORY))
            self.assertTrue(self.save(e, 2, DISK))
        with mock.patch("dlrover_ckpt.segment.Buffer.publish", side_effect=stale):
            self.assertFalse(self.save(e, 3, MEMORY))
        self.assertEqual(self.loaded(e), ("disk", 2, 2.0))
        self.assertTrue(self.save(e, 4, MEMORY))

    def test_the_limit_that_binds_is_named(self):
        e = self.engine()
        shm = e._pool._seg
        with mock.patch("os.statvfs", return_value=mock.Mock(f_bavail=1, f_frsize=1000)):
            self.assertIn("make /dev/shm larger", segment.remedy(shm))
        with mock.patch("dlrover_ckpt.segment._available", return_value=[1000]):
            self.assertIn("the machine has no more memory", segment.remedy(shm))
        with mock.patch("dlrover_ckpt.segment._cgroup_free", return_value=[1 << 60, 1000]):
            self.assertEqual(segment.free_bytes(shm), 1000)
            with self.assertLogs("dlrover", "WARNING") as logs:
                self.assertFalse(self.save(e, 1, MEMORY))
        self.assertIn("raise the container's limit of memory", "".join(logs.output))

    def test_shards_of_processes_that_cannot_agree(self):
        e = self.engine(shards=2, resize="same")
        with self.assertRaisesRegex(SaveFailed, "2 shards need torch.distributed, which is not initialised"):
            self.save(e, 1, DISK)
        self.assertEqual([name for _, _, names in os.walk(self.dir) for name in names], [])
        self.assertIsNone(self.loaded(e, "disk"))

    def test_a_shard_that_nobody_writes(self):
        """The tracker names no save without it, which nobody could load: of 2 shards with one process, say."""
        e = self.engine(shards=2, resize="same")
        alone = mock.Mock(wraps=e._ranks, agree_alone=False, gather=lambda mine: [mine])
        with mock.patch.object(e, "_ranks", alone), self.assertRaisesRegex(SaveFailed, "no process writes shard 1 of 2"):
            self.save(e, 1, DISK)
        self.assertEqual([name for _, _, names in os.walk(self.dir) for name in names], [])

    def test_waiting_in_vain(self):
        e = self.engine()
        self.assertEqual(e.wait(), 0)
        with self.assertRaises(TimeoutError):
            e.wait(3, timeout=0.05)


class Processes(One):
    def setUp(self):
        super().setUp()
        self.launched()

    SAVE = """
        import torch
        from dlrover_ckpt.engine import Engine, StorageType
        from dlrover_ckpt.image import torch_zip
        e = Engine(dir, "ddp", shard=0, shards=1, primary=True, resize="any")
        def save(step, n=1000):
            return e.save(step, [torch_zip("%d/rank_0.pt" % step, {"w": torch.full((n,), float(step)), "step": step})],
                          StorageType.MEMORY)
    """

    def test_killed_in_the_middle_of_a_copy(self):
        p = self.child(self.SAVE + """
        from dlrover_ckpt import copying
        save(1); save(2)
        def stuck(*_):
            print("copying", flush=True)
            sys.stdin.read()
        copying._run = stuck
        save(3)
        """)
        self.assertEqual(p.stdout.readline().strip(), "copying")
        p.send_signal(signal.SIGKILL)
        p.wait()
        self.assertEqual(self.loaded(self.engine()), ("memory", 2, 2.0))

    def test_the_next_process_loads_and_goes_on(self):
        self.finish(self.child(self.SAVE + """
        save(1); save(2)
        """))
        e = self.engine()
        self.assertEqual(self.loaded(e), ("memory", 2, 2.0))
        self.assertTrue(all(self.save(e, s) for s in range(3, 8)))
        self.assertEqual(self.loaded(e), ("memory", 7, 7.0))

    def test_a_fork_while_saving(self):
        out = self.finish(self.child(self.SAVE + """
        from dlrover_ckpt import copying
        real = copying._run
        def fork(*args):
            pid = os.fork()
            if pid == 0:
                import gc
                for call in (lambda: save(9), e.load, e.wait):
                    try:
                        call()
                        os._exit(1)
                    except RuntimeError:
                        pass
                e.__dict__.clear(); gc.collect()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            import subprocess
            code = ("import fcntl, sys\\nf = open(sys.argv[1], 'rb')\\ntry:\\n"
                    "    fcntl.lockf(f, fcntl.LOCK_SH | fcntl.LOCK_NB)\\n    print('free')\\n"
                    "except OSError:\\n    print('locked')")
            (path,) = [b.path for b in e._pool.buffers if b.fd >= 0 and b.header().state == 1]
            print(subprocess.check_output([sys.executable, "-c", code, path]).decode().strip())
            return real(*args)
        save(1)
        copying._run = fork
        print(save(2))
        """))
        self.assertEqual(out.split(), ["locked", "True"])
        self.assertEqual(self.loaded(self.engine()), ("memory", 2, 2.0))


class Daemon(threading.Thread):
    """A daemon of few words: it says what it is told to say and remembers what it was asked."""

    def __init__(self, runtime, answers=None):
        super().__init__(daemon=True)
        self.path = os.path.join(runtime, "sock")
        self.answers = answers or {}
        self.asked = []
        self.conns = []
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(self.path)
        self.server.listen(8)
        self.start()

    def run(self):
        while True:
            try:
                conn, _ = self.server.accept()
            except OSError:
                return
            self.conns.append(conn)
            threading.Thread(target=self.serve, args=(conn,), daemon=True).start()

    def serve(self, conn):
        try:
            with conn, conn.makefile("rb") as f:
                for line in f:
                    request = json.loads(line.decode())
                    self.asked.append(request)
                    answer = self.answers.get(request["op"], {})
                    answer = answer(request) if callable(answer) else answer
                    conn.sendall(json.dumps(dict({"ok": True}, **answer)).encode() + b"\n")
        except (OSError, ValueError):
            pass

    def stop(self):
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        for c in self.conns:
            try:
                c.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        os.unlink(self.path)

    def ops(self, op):
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            got = [r for r in self.asked if r["op"] == op]
            if got:
                return got
            time.sleep(0.01)
        return []


class WithDaemon(One):
    def setUp(self):
        super().setUp()
        self.runtime = self.launched()

    def daemon(self, **answers):
        d = Daemon(self.runtime, answers)
        self.addCleanup(lambda: d.server.fileno() >= 0 and d.stop())
        return d

    def headers(self):
        seg = os.path.join(self.runtime, "seg")
        names = sorted(n for n in os.listdir(seg) if n.endswith(".seg"))  # not what is being made
        return {n: segment.parse_header(open(os.path.join(seg, n), "rb").read(4096)) for n in names}

    def test_a_disk_save_is_left_to_it(self):
        d = self.daemon()
        e = self.engine()
        self.assertTrue(self.save(e, 4, DISK))
        (saved,) = d.ops("saved")
        self.assertEqual((saved["seg"], saved["seq"], saved["step"], saved["disk"]), ("l0-0.seg", 1, 4, True))
        self.assertTrue(self.headers()["l0-0.seg"].pending)
        self.assertFalse(os.path.exists(self.dir + "/4"))
        hello = d.ops("hello")[0]
        self.assertEqual((hello["v"], hello["rank"], hello["pid"]), (1, 0, os.getpid()))

    def test_only_the_primary_asks_for_the_disk(self):
        self.daemon()
        self.save(self.engine(primary=False), 4, DISK)
        self.assertFalse(self.headers()["l0-0.seg"].pending)

    def test_notes_are_passed_on(self):
        self.daemon(saved={"note": "storage is full"})
        e = self.engine()
        with self.assertLogs("dlrover.ckpt", "WARNING") as logs:
            for step in range(1, 100):
                self.save(e, step)
                time.sleep(0.01)
                if any("storage is full" in line for line in logs.output):
                    break
        self.assertIn("storage is full", logs.output[-1])

    def test_it_comes_back(self):
        first = self.daemon()
        e = self.engine()
        self.save(e, 1)
        first.ops("saved")
        first.stop()
        self.assertTrue(self.save(e, 2))
        second = self.daemon()
        self.assertTrue(self.save(e, 3))
        self.assertEqual([r["step"] for r in second.ops("saved")], [3])

    def test_it_is_gone_but_the_run_is_owned(self):
        import fcntl

        with open(os.path.join(self.runtime, "owner"), "w") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            self.save(self.engine(), 1, DISK)
            self.assertTrue(self.headers()["l0-0.seg"].pending)
        self.save(self.engine(), 2, DISK)
        self.assertEqual(sync.tracked(self.dir), 2)

    def test_a_new_one_is_told_what_the_worker_writes(self):
        """It leaves the save alone whose file is locked, from the plan on until all is published."""
        seen = []

        def looked(step):
            def call(*args):
                names = [n for n in os.listdir(self.runtime) if n.startswith("writing-")]
                with open(os.path.join(self.runtime, names[0])) as f:  # another description: as another process
                    seen.append((step.__name__, names, inline._locked(f.fileno())))
                return step(*args)
            return call

        e = self.engine()
        with mock.patch.object(sync, "write_shard", looked(sync.write_shard)), \
                mock.patch.object(sync, "publish", looked(sync.publish)):
            self.save(e, 2, DISK)
        name = "writing-%s.0" % sync.manifest(self.dir, 2)["save"]
        self.assertEqual(seen, [("write_shard", [name], False), ("publish", [name], False)])
        self.assertEqual([n for n in os.listdir(self.runtime) if n.startswith("writing-")], [])

    def test_one_that_does_not_answer_delays_nothing(self):
        d = self.daemon(saved=lambda _: time.sleep(60) or {})
        e = self.engine()
        for step in range(1, 20):
            self.assertTrue(self.save(e, step))
        self.assertEqual(len(d.ops("saved")), 1)

    def test_it_hears_for_how_long_saves_block(self):
        """Those that took long at once, the end of others with the next save."""
        d = self.daemon(wait=lambda r: time.sleep(0.2) or {"committed": r["step"]})
        e = self.engine()

        def slow():
            time.sleep(0.3)
            raise RuntimeError("no images")

        with self.assertRaisesRegex(RuntimeError, "no images"):
            e.save(1, slow, MEMORY)
        self.assertTrue(self.save(e, 2))
        time.sleep(0.3)  # this is training
        self.assertTrue(self.save(e, 3, DISK))
        self.assertEqual(e.wait(timeout=10), 3)
        while len(d.ops("saved")) < 4:
            time.sleep(0.01)
        told = [r["blocked_ns"] / 1e9 for r in d.ops("saved")]
        self.assertEqual(told, sorted(told))
        self.assertGreaterEqual(told[0], 0.3)
        self.assertGreaterEqual(told[3] - told[2], 0.2)
        self.assertLess(told[2] - told[1], 0.25)

    def test_it_hears_what_was_loaded(self):
        d = self.daemon(offers={"offers": [{"seg": "seg/l0-0.seg"}]})
        e = self.engine()
        self.assertIsNone(e.load())
        self.save(e, 3)
        self.assertEqual(self.loaded(e), ("memory", 3, 3.0))
        while len(d.ops("loaded")) < 2:
            time.sleep(0.01)
        self.assertEqual([(r["step"], r["source"], r["dir"]) for r in d.ops("loaded")],
                         [(0, "", self.dir), (3, "memory", self.dir)])

    def test_waiting(self):
        d = self.daemon(wait=lambda r: {"committed": r["step"]})
        e = self.engine()
        self.save(e, 3, DISK)
        self.assertEqual(e.wait(timeout=10), 3)
        self.assertEqual(len(d.ops("wait")[0]["save"]), 16)
        d.answers["wait"] = {"ok": False, "error": "superseded by step 9"}
        with self.assertRaisesRegex(SaveFailed, "superseded by step 9"):
            e.wait(timeout=10)

    def test_it_is_asked_again_if_it_may_have_more(self):
        for offers, times in ({"more": False}, 1), ({"more": True}, 2), ({}, 2):  # of an older version: nothing of it
            d = self.daemon(offers=offers)
            self.assertIsNone(self.engine().load())
            self.assertEqual([r["timeout_ms"] > 0 for r in d.ops("offers")], [False, True][:times])
            d.stop()

    def test_loading_what_it_offers(self):
        d = self.daemon(offers={"offers": [{"seg": "seg/l0-0.seg"}, {"seg": "peer/../../x"}, {"seg": "peer/r9-0.seg"}]})
        e = self.engine()
        self.save(e, 3)
        self.assertEqual(self.loaded(e), ("memory", 3, 3.0))
        self.assertEqual(d.ops("offers")[0]["dir"], self.dir)
        os.makedirs(os.path.join(self.runtime, "peer"))
        shutil.copy(os.path.join(self.runtime, "seg", "l0-0.seg"), os.path.join(self.runtime, "peer", "r9-0.seg"))
        for b in e._pool.buffers:
            b.remove()
        self.assertEqual(self.loaded(e), ("memory", 3, 3.0))

    def test_its_word_on_files_counts(self):
        e = self.engine()
        self.save(e, 1, DISK)
        self.save(e, 2, DISK)
        d = self.daemon(verify=lambda r: {"good": r["step"] == 1, "reason": "bits flipped"})
        with self.assertLogs("dlrover.ckpt", "WARNING") as logs:
            self.assertEqual(self.loaded(e, "disk"), ("disk", 1, 1.0))
        self.assertIn("bits flipped", logs.output[-1])
        self.assertEqual(len(d.ops("verify")), 2)


if __name__ == "__main__":
    import unittest

    unittest.main()
