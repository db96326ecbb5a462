"""What other checkpoint engines are known to do wrong."""

import fcntl
import hashlib
import os
import socket
import time
import unittest
from unittest import mock

from core_help import Case
import test_core_engine as core
import test_core_ranks as ranks

import torch

from dlrover_ckpt import segment, sync
from dlrover_ckpt.engine import Engine
from dlrover_ckpt.image import torch_load, torch_zip

MEMORY, DISK = core.MEMORY, core.DISK


class Daemons(core.One):
    daemon, headers = core.WithDaemon.daemon, core.WithDaemon.headers

    def setUp(self):
        super().setUp()
        self.runtime = self.launched()

    def test_one_that_is_being_started_delays_nothing(self):
        """The launcher listens; whoever is to answer still waits for something else."""
        server = socket.socket(socket.AF_UNIX)
        self.addCleanup(server.close)
        server.bind(os.path.join(self.runtime, "sock"))
        server.listen(8)
        e = self.engine()
        self.save(e, 1)
        began = time.monotonic()
        for step in range(2, 12):
            self.assertTrue(self.save(e, step, MEMORY))
        self.assertTrue(self.save(e, 12, DISK))
        self.assertLess(time.monotonic() - began, 2.0)
        self.assertEqual([h.pending for h in self.headers().values()].count(True), 1, "it is left to the daemon")
        conn, _ = server.accept()
        self.addCleanup(conn.close)
        conn.settimeout(5)
        said = b""
        while said.count(b"\n") < 12:
            said += conn.recv(65536)
        self.assertIn(b'"op": "hello"', said.splitlines()[0], "and hears of everything")

    def test_one_of_another_version_says_why(self):
        d = self.daemon(hello={"ok": False, "error": "the client speaks version 1"})
        e = self.engine()
        with self.assertLogs("dlrover.ckpt", "WARNING") as logs:
            for step in range(1, 100):
                self.assertTrue(self.save(e, step))
                if any("speaks version 1" in line for line in logs.output):
                    break
                time.sleep(0.01)
        self.assertIn("speaks version 1", logs.output[-1])
        self.assertTrue(d.asked)


class Directories(core.One):
    def test_the_newest_of_each_stays(self):
        """A model that is saved often does not push out one that is saved now and then."""
        self.launched()
        a = self.engine()
        b = Engine(self.dir + "-b", "ddp", shard=0, shards=1, primary=True, resize="any")
        self.save(a, 1)
        for step in range(1, 8):
            self.save(b, step)
        self.assertEqual(self.loaded(b), ("memory", 7, 7.0))
        self.assertEqual(self.loaded(a), ("memory", 1, 1.0))


class Turns(core.One):
    def test_the_daemon_waits_while_a_worker_publishes(self):
        """Both look at what the tracker names, and may then move it: one at a time, or it goes back."""
        runtime = self.launched()
        e = self.engine()
        with open(os.path.join(runtime, "turn-" + hashlib.sha256(self.dir.encode()).hexdigest()[:16]), "w") as f:
            publish, kept = sync.publish, []

            def watched(*args):
                try:
                    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    kept.append(True)
                publish(*args)

            with mock.patch.object(sync, "publish", watched), self.assertLogs("dlrover.ckpt", "WARNING"):
                self.save(e, 1, DISK)
            self.assertEqual(kept, [True])
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)  # and then it has its turn
            with mock.patch("dlrover_ckpt.inline._LOCK_PATIENCE", 0.1), self.assertLogs("dlrover.ckpt", "WARNING"):
                self.save(e, 2, DISK)
        self.assertEqual(sync.tracked(self.dir), 2, "one that is stopped is waited for only so long")


class Histories(Case):
    def test_two_lives_are_not_mixed(self):
        """torchrun starts workers again under the same names when a node has joined. What one rank holds of the first
        life and another of the second is not a save, though both call it step 2."""
        self.launched()
        self.world(ranks.SHARDED + "    e.load(); save(1); save(2)\n")
        out = self.world(ranks.SHARDED + """
    e.load()
    if rank == 1:
        for step in (2, 3, 4):
            e.save(step, [torch_zip("%d/1.pt" % step, {"w": torch.zeros(3), "step": step})], StorageType.MEMORY)
    dist.barrier()
    print(e.load())
    """)
        self.assertEqual(out, ["None\n"] * 2)


class States(core.One):
    def test_a_state_that_grows(self):
        """Before the first step of an optimizer it has no state."""
        e = self.engine()
        model = torch.nn.Linear(4, 4)
        opt = torch.optim.Adam(model.parameters())
        for step in range(1, 4):
            state = {"model": model.state_dict(), "opt": opt.state_dict(), "step": step}
            self.assertTrue(e.save(step, [torch_zip("a.pt", state)], MEMORY))
            opt.zero_grad()
            model(torch.ones(4)).sum().backward()
            opt.step()
        got = torch_load(e.load().files["a.pt"])
        self.assertEqual(len(got["opt"]["state"]), 2)

    def test_what_is_saved_comes_back_as_it_was(self):
        e = self.engine()
        tied = torch.arange(6.0)
        state = {"a": tied, "b": tied, "strided": torch.arange(6).reshape(2, 3).t(), "empty": torch.zeros(0, 7),
                 "bytes": torch.ones(3, dtype=torch.int8), "half": torch.ones(3, dtype=torch.bfloat16),
                 "tuple": (torch.ones(2), [torch.zeros(1)])}
        e.save(1, [torch_zip("a.pt", state)], MEMORY)
        got = torch_load(e.load().files["a.pt"])
        self.assertEqual(got["a"].data_ptr(), got["b"].data_ptr())
        self.assertEqual(got["strided"].stride(), (1, 3))
        self.assertEqual(tuple(got["empty"].shape), (0, 7))
        self.assertEqual(got["a"].data_ptr() % 4, 0)
        self.assertTrue(torch.equal(got["half"], state["half"]))
        self.assertIsInstance(got["tuple"], tuple)
        self.assertTrue(torch.equal(got["tuple"][1][0], torch.zeros(1)))

    def test_nothing_of_others_is_imported(self):
        """A job with DDP alone needs neither transformers nor safetensors."""
        out = self.finish(self.child("""
        for name in ("transformers", "safetensors", "deepspeed", "megatron"):
            sys.modules[name] = None
        import torch
        save, load = torch.save, torch.load
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
        c = DdpCheckpointer(dir)
        c.save_checkpoint(1, {"w": torch.ones(3)}, storage_type=StorageType.DISK)
        c.wait_latest_checkpoint(30)
        print(c.load_checkpoint()["w"].tolist(), torch.save is save and torch.load is load)
        """))
        self.assertEqual(out.split("\n")[0], "[1.0, 1.0, 1.0] True")


class Segments(Case):
    def test_memory_is_allocated_before_it_is_mapped(self):
        """Blocks, not only a size: a full file system is an error of a call, never a signal."""
        path = os.path.join(self.shm, "l0-0.seg")
        b = segment.Buffer(path)
        fd = b.make(4 << 20, 0)
        b.take(fd, 4 << 20)
        self.addCleanup(b.close)
        self.assertGreaterEqual(os.stat(path).st_blocks * 512, 4 << 20)


if __name__ == "__main__":
    unittest.main()
