"""dlrover.python.common.storage."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import unittest
from unittest import mock

from dlrover.python.common import storage
from dlrover.trainer.torch.flash_checkpoint import megatron_dist_ckpt


class StorageCase(unittest.TestCase):
    def setUp(self) -> None:
        self.dir = tempfile.mkdtemp(prefix="dlrover-test-")
        self.addCleanup(shutil.rmtree, self.dir)

    def path(self, *names: str) -> str:
        return os.path.join(self.dir, *names)

    def steps(self, names=None):
        return sorted(n for n in os.listdir(self.dir) if n != "dlrover_latest.txt")


class Strategies(StorageCase):
    def clean(self, strategy, steps, name=str) -> None:
        """Commits steps one after the other."""
        for before, step in zip([None] + steps[:-1], steps):
            os.mkdir(self.path(name(step)))
            if before is not None:
                strategy.clean_up(before, shutil.rmtree)

    def test_keep_latest(self) -> None:
        self.clean(storage.KeepLatestStepStrategy(3, self.dir), [1, 2, 3, 4, 5])
        self.assertEqual(["3", "4", "5"], self.steps())

    def test_keep_latest_keeps_at_least_one(self) -> None:
        self.clean(storage.KeepLatestStepStrategy(0, self.dir), [1, 2, 3])
        self.assertEqual(["3"], self.steps())

    def test_keep_interval(self) -> None:
        self.clean(storage.KeepStepIntervalStrategy(4, self.dir), [2, 4, 6, 8, 10])
        self.assertEqual(["10", "4", "8"], self.steps())

    def test_megatron_directories(self) -> None:
        name = "iter_{:07d}".format
        self.clean(megatron_dist_ckpt.KeepLatestStepStrategy(1, self.dir), [1, 2], name)
        self.clean(megatron_dist_ckpt.KeepStepIntervalStrategy(5, self.dir), [4, 5, 6], name)
        self.assertEqual([name(2), name(5), name(6)], self.steps())

    def test_failed_deletion_is_no_error(self) -> None:
        with self.assertLogs("dlrover", "WARNING"):
            storage.KeepLatestStepStrategy(1, self.dir).clean_up(1, shutil.rmtree)

    def test_rules_as_data(self) -> None:
        class Own(storage.KeepLatestStepStrategy):
            def clean_up(self, step, delete_func):
                pass

        self.assertEqual({"keep_latest": 2}, storage.KeepLatestStepStrategy(2, "x").retention())
        self.assertEqual({"keep_interval": 5}, storage.KeepStepIntervalStrategy(5, "x").retention())
        self.assertEqual({"keep_latest": 2}, megatron_dist_ckpt.KeepLatestStepStrategy(2, "x").retention())
        self.assertIsNone(Own(2, "x").retention())

    def test_interval_of_nothing(self) -> None:
        with self.assertRaisesRegex(ValueError, "at least 1"):
            storage.KeepStepIntervalStrategy(0, "x")


class Deletion(StorageCase):
    def run_steps(self, disk, steps) -> None:
        for step in steps:
            disk.write(str(step), self.path("dlrover_latest.txt"))
            os.mkdir(self.path(str(step)))
            disk.commit(step, True)

    def test_keep_latest(self) -> None:
        disk = storage.get_checkpoint_storage(storage.KeepLatestStepStrategy(3, self.dir))
        self.run_steps(disk, range(1, 5))
        self.assertEqual(["2", "3", "4"], self.steps())
        meta = disk.get_class_meta()
        self.assertEqual(("PosixStorageWithDeletion", "dlrover_latest.txt"),
                         (meta.class_name, meta.kwargs["tracker_file"]))

    def test_keep_interval(self) -> None:
        self.run_steps(storage.get_checkpoint_storage(storage.KeepStepIntervalStrategy(4, self.dir)), range(1, 9))
        self.assertEqual(["4", "8"], self.steps())

    def test_failed_save_deletes_nothing(self) -> None:
        disk = storage.get_checkpoint_storage(storage.KeepLatestStepStrategy(1, self.dir))
        self.run_steps(disk, [1])
        disk.write("2", self.path("dlrover_latest.txt"))
        disk.commit(2, False)
        self.assertEqual(["1"], self.steps())

    def test_damaged_tracker_is_no_error(self) -> None:
        disk = storage.get_checkpoint_storage(storage.KeepLatestStepStrategy(1, self.dir))
        disk.write("garbage", self.path("dlrover_latest.txt"))
        self.run_steps(disk, [2])
        self.assertEqual(["2"], self.steps())

    def test_strategy_of_a_storage(self) -> None:
        strategy = storage.KeepLatestStepStrategy(1, self.dir)
        self.assertIs(strategy, storage.deletion_strategy_of(storage.get_checkpoint_storage(strategy)))
        self.assertIsNone(storage.deletion_strategy_of(storage.get_checkpoint_storage(None)))
        self.assertIsNone(storage.deletion_strategy_of(None))


class Disk(StorageCase):
    disk = storage.PosixDiskStorage()

    def test_write_and_read(self) -> None:
        for content in ("text", b"bytes", memoryview(b"view")):
            self.disk.write(content, self.path("file"))
            self.assertEqual(bytes(content, "ascii") if isinstance(content, str) else bytes(content),
                             self.disk.read(self.path("file"), "rb"))
        self.assertEqual("view", self.disk.read(self.path("file")))
        self.assertEqual("", self.disk.read(self.path("missing")))
        self.assertEqual(0o666 & ~storage._umask(), stat.S_IMODE(os.stat(self.path("file")).st_mode))

    def test_write_into_a_missing_directory(self) -> None:
        with self.assertRaises(OSError):
            self.disk.write("text", self.path("missing", "file"))

    def test_failed_write_leaves_the_old_file(self) -> None:
        self.disk.write("old", self.path("file"))
        for call in ("os.fsync", "os.replace"):
            with mock.patch(call, side_effect=OSError("no space")), self.assertRaises(OSError):
                self.disk.write("new", self.path("file"))
            self.assertEqual((["file"], "old"), (os.listdir(self.dir), self.disk.read(self.path("file"))))

    def test_durable_before_it_has_its_name(self) -> None:
        order = []
        fsync, replace = os.fsync, os.replace
        with mock.patch("os.fsync", lambda fd: (order.append("fsync"), fsync(fd))), \
                mock.patch("os.replace", lambda a, b: (order.append("replace"), replace(a, b))):
            self.disk.write("text", self.path("file"))
        self.assertEqual(["fsync", "replace", "fsync"], order)

    def test_state_dict(self) -> None:
        import torch

        path = self.path("new", "model.pt")
        self.disk.write_state_dict({"a": torch.ones(2)}, path, torch.save)
        self.assertEqual([1.0, 1.0], self.disk.read_state_dict(path, torch.load)["a"].tolist())
        self.assertEqual({}, self.disk.read_state_dict(self.path("missing"), torch.load))

    def test_directories(self) -> None:
        self.disk.safe_makedirs(self.path("a", "b"))
        self.disk.write("text", self.path("a", "b", "file"))
        self.disk.safe_move(self.path("a"), self.path("c"))
        self.assertEqual(["b"], self.disk.listdir(self.path("c")))
        self.disk.safe_remove(self.path("c", "b", "file"))
        self.disk.safe_remove(self.path("c", "b", "file"))
        self.assertFalse(self.disk.exists(self.path("c", "b", "file")))
        self.disk.safe_rmtree(self.path("c"))
        self.disk.safe_rmtree(self.path("c"))
        self.assertEqual([], os.listdir(self.dir))


if __name__ == "__main__":
    unittest.main()
