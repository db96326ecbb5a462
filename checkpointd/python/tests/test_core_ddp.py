"""The public class for models whose every rank has the full state, and the guess at the size of its checkpoints."""

import os
import unittest

from core_help import Case

import torch

from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from dlrover_ckpt import estimate


class Ddp(Case):
    def test_memory_and_disk(self):
        c = DdpCheckpointer(self.dir)
        self.assertEqual(c.load_checkpoint(), {})
        model = torch.nn.Linear(3, 3)
        c.save_checkpoint(1, {"model": model.state_dict(), "epoch": 4}, storage_type=StorageType.MEMORY)
        self.assertFalse(os.path.exists(self.dir + "/1"))
        c.save_checkpoint(2, {"model": model.state_dict(), "epoch": 5})
        c.wait_latest_checkpoint(timeout=30)
        self.assertEqual(os.listdir(self.dir + "/2"), ["rank_0.pt"])
        got = c.load_checkpoint()
        self.assertEqual(got["epoch"], 5)
        model.load_state_dict(got["model"])
        self.assertEqual(c.load_checkpoint(self.dir + "/2/rank_0.pt")["epoch"], 5)

    def test_paths(self):
        c = DdpCheckpointer(self.dir)
        c.save_checkpoint(1, {"a": 1}, path=self.dir + "/own/name.pt")
        self.assertEqual(torch.load(self.dir + "/own/name.pt"), {"a": 1})
        c.save_checkpoint(2, {"a": 2}, path=self.top + "/elsewhere.pt")
        self.assertEqual(torch.load(self.top + "/elsewhere.pt"), {"a": 2})
        for b in c._engine._pool.buffers:
            b.remove()
        self.assertEqual(c.load_checkpoint(), {"a": 2})

    def test_bad_type(self):
        with self.assertRaises(ValueError):
            DdpCheckpointer(self.dir).save_checkpoint(1, {}, storage_type=2)

    def test_a_missing_file_is_an_error(self):
        with self.assertRaises(FileNotFoundError):
            DdpCheckpointer(self.dir).load_checkpoint(self.dir + "/none.pt")


class Guess(Case):
    def test_from_steps(self):
        told = []
        estimate.hear_steps()
        estimate.from_steps(told.append)
        self.addCleanup(estimate._waiting.clear)
        size = 4 * (1000 * 1000 + 1000)
        adam, sgd = (make(torch.nn.Linear(1000, 1000).parameters(), lr=0.1)
                     for make in (torch.optim.Adam, torch.optim.SGD))
        for optimizer in (adam, sgd, adam, torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.zeros_like(p)
            optimizer.step()
        self.assertEqual(len(told), 2, "one that has stepped before ends it")
        self.assertAlmostEqual(told[0], 3 * size, delta=100)
        self.assertEqual(told[1] - told[0], size)

    def test_a_fresh_job_is_prepared_by_its_first_step(self):
        model = torch.nn.Linear(1000, 1000)
        optimizer = torch.optim.Adam(model.parameters())
        c = DdpCheckpointer(self.dir)
        c._engine._guessing.join(30)
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
        pool = c._engine._pool
        self.assertTrue(pool.prepared(30))
        self.assertEqual([b.ready and b.capacity > 12 << 20 for b in pool.buffers], [True] * 3)

    def test_nothing_of_the_user_notices(self):
        """No code of the user's runs because of us, and no destructor in a thread of ours."""
        self.finish(self.child("""
            import threading, time, warnings, torch
            warnings.simplefilter("error")
            from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
            seen, threads = [], set()
            class Shy:
                __class__ = property(lambda self: seen.append("__class__"))
                def __getattr__(self, name):
                    seen.append(name)
                    raise AttributeError(name)
                def __del__(self):
                    threads.add(threading.get_ident())
            class Tensor(torch.Tensor):
                @classmethod
                def __torch_function__(cls, func, types, args=(), kwargs=None):
                    seen.append(func)
                    return super().__torch_function__(func, types, args, kwargs or {})
            class Optimizer(torch.optim.SGD):
                def __getattribute__(self, name):
                    if quiet:
                        seen.append(name)
                    return super().__getattribute__(name)
            quiet = False
            o = Optimizer([torch.zeros(4, requires_grad=True)], lr=0.1)
            o.state[o.param_groups[0]["params"][0]] = {"mine": torch.zeros(1).as_subclass(Tensor), "shy": Shy()}
            shy, dropped = [Shy() for _ in range(1000)], 0
            seen.clear()
            c = DdpCheckpointer(dir)
            while c._engine._guessing.is_alive() or dropped < 10000:
                shy[dropped % 1000] = Shy()
                dropped += 1
            from dlrover_ckpt import estimate
            quiet = True
            assert estimate._waiting
            estimate._stepped(o)
            quiet = False
            assert not seen, seen
            assert threads == {threading.get_ident()}, threads
        """))

    def test_from_disk(self):
        DdpCheckpointer(self.dir).save_checkpoint(1, {"w": torch.zeros(1 << 18)})
        self.assertGreater(estimate.from_disk(self.dir, 0, 1), 1 << 20)
        self.assertEqual(estimate.from_disk(self.dir, 0, 2), 0)

    def test_segments_are_ready_before_the_first_save(self):
        DdpCheckpointer(self.dir).save_checkpoint(1, {"w": torch.zeros(1 << 18)})
        os.environ["DLROVER_CKPT_SHM"] = os.path.join(self.top, "other")
        os.mkdir(os.environ["DLROVER_CKPT_SHM"])
        c = DdpCheckpointer(self.dir)
        c._engine._guessing.join(30)
        pool = c._engine._pool
        self.assertTrue(pool.prepared(30))
        self.assertEqual([b.ready and b.capacity > 1 << 20 for b in pool.buffers], [True] * 3)


if __name__ == "__main__":
    unittest.main()
