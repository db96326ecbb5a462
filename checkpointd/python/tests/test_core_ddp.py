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
    def test_from_modules(self):
        before = estimate.from_modules()
        model = torch.nn.Linear(1000, 1000)
        size = 4 * (1000 * 1000 + 1000)
        self.assertEqual(estimate.from_modules() - before, size)
        adam = torch.optim.Adam(model.parameters())
        self.assertEqual(estimate.from_modules() - before, 3 * size)
        del adam

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
