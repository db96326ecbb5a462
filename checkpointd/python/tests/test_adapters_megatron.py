"""Megatron-LM jobs that are stopped and started again."""

from __future__ import annotations

import os
import threading
import unittest
from typing import Any, List, Optional
from unittest import mock

from tests.adapters_jobs import HERE, JobCase, megatron_args

NEW = os.path.join(HERE, "megatron_new")
OLD = os.path.join(HERE, "megatron_old")
TRACKER = "latest_checkpointed_iteration.txt"


class _Scheduler:
    steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"]


def _modules() -> Any:
    from dlrover.trainer.torch.flash_checkpoint import megatron

    return megatron.checkpointing_module()


def _begin(directory: str, **changes: Any) -> Any:
    """A process of a job at its start: (checkpointing module, model, optimizer, scheduler)."""
    import torch

    checkpointing = _modules()
    checkpointing._ARGS = megatron_args(directory, **changes)
    if "training" not in checkpointing.__name__:
        return checkpointing, [torch.nn.Linear(3, 2)], None, None
    from megatron.core.optimizer import DistributedOptimizer

    rank = checkpointing._ARGS.data_parallel_rank
    return checkpointing, [torch.nn.Linear(3, 2)], DistributedOptimizer(torch.zeros(5), rank == 0), _Scheduler()


def _fill(model: Any, optimizer: Any, scheduler: Any, value: float) -> None:
    import torch

    with torch.no_grad():
        for p in model[0].parameters():
            p.fill_(value)
    if optimizer is not None:
        optimizer.step_count = int(value)
        optimizer.param_state.fill_(value)
        scheduler.steps = int(value)


def _values(model: Any, optimizer: Any, scheduler: Any) -> List[float]:
    values = [float(p.min()) for p in model[0].parameters()]
    if optimizer is not None:
        values += [optimizer.step_count, float(optimizer.param_state.min()), scheduler.steps]
    return values


def saves(directory: str, saves: List[List[Any]], changes: Optional[dict] = None, api: str = "megatron",
          settings: Optional[dict] = None) -> List[Any]:
    """Saves [step, storage type] one after the other and waits for the disk."""
    import importlib

    import torch

    flash = importlib.import_module("dlrover.trainer.torch.flash_checkpoint." + api)
    checkpointing, *state = _begin(directory, **(changes or {}))
    results: List[Any] = []
    for step, storage_type in saves:
        _fill(*state, value=step)
        results.append(flash.save_checkpoint(step, *state, 7 * step, storage_type=flash.StorageType[storage_type],
                                             **(settings or {})))
        if storage_type == "DISK":
            results.append(flash.wait_latest_checkpoint(timeout=60))
    assert checkpointing.torch is torch and type(torch).__name__ == "module"
    return results


def loads(directory: str, changes: Optional[dict] = None, api: str = "megatron") -> List[Any]:
    """Loads into a fresh process: [what load_checkpoint returns, the values]."""
    import importlib

    import torch

    flash = importlib.import_module("dlrover.trainer.torch.flash_checkpoint." + api)
    checkpointing, *state = _begin(directory, **(changes or {}))
    loaded = flash.load_checkpoint(*state)
    assert checkpointing.torch is torch
    assert checkpointing._ARGS.load == (changes or {}).get("load", directory)
    return [loaded, _values(*state)]


def loads_without_us(directory: str) -> List[Any]:
    checkpointing, *state = _begin(directory, use_distributed_optimizer=True)
    return [checkpointing.load_checkpoint(*state), _values(*state)]


def saves_without_us(directory: str, step: int) -> None:
    checkpointing, *state = _begin(directory)
    _fill(*state, value=step)
    checkpointing.save_checkpoint(step, *state, 0)


def customers_example(directory: str) -> List[Any]:
    """The guide's example: keywords in any order, replica_count, and storage."""
    from dlrover.trainer.torch.flash_checkpoint.megatron_dist_ckpt import (
        StorageType, load_checkpoint, save_checkpoint, wait_latest_checkpoint)
    from dlrover.python.common.storage import PosixDiskStorage

    checkpointing, model, optimizer, opt_param_scheduler = _begin(directory)
    first = load_checkpoint(model, optimizer, opt_param_scheduler, replica_count=2)
    _fill(model, optimizer, opt_param_scheduler, 5)
    save_checkpoint(model=model, iteration=5, optimizer=optimizer, num_floating_point_operations_so_far=0,
                    opt_param_scheduler=opt_param_scheduler, storage_type=StorageType.MEMORY, replica_count=2)
    save_checkpoint(replica_count=2, storage=PosixDiskStorage(), storage_type=StorageType.DISK, iteration=6,
                    opt_param_scheduler=opt_param_scheduler, num_floating_point_operations_so_far=9,
                    optimizer=optimizer, model=model)
    wait_latest_checkpoint()
    save_checkpoint(7, model, optimizer, opt_param_scheduler, 11, StorageType.MEMORY)
    return [first]


class Restart(JobCase):
    def test_memory_saves_show_nothing_on_disk_and_are_loaded(self) -> None:
        self.assertEqual([[True]], self.start(saves, self.dir, [[10, "MEMORY"]], path=NEW))
        self.assertEqual([], self.visible())
        self.assertEqual([[[10, 70], [10.0] * 2 + [10, 0.0, 10]]], self.start(loads, self.dir, path=NEW), self.log)

    def test_disk_save_is_megatrons_own(self) -> None:
        distributed = {"use_distributed_optimizer": True}
        self.assertEqual([[True, 20]], self.start(saves, self.dir, [[20, "DISK"]], distributed, path=NEW), self.log)
        self.assertEqual(["iter_0000020", TRACKER], self.visible())
        self.assertEqual("20", self.text(TRACKER))
        self.assertEqual(["distrib_optim.pt", "model_optim_rng.pt"],
                         sorted(os.listdir(os.path.join(self.dir, "iter_0000020", "mp_rank_00"))))
        expected = [[[20, 140], [20.0] * 2 + [20, 20.0, 20]]]
        self.assertEqual(expected, self.start(loads_without_us, self.dir, path=NEW))

    def test_memory_is_newer_than_disk(self) -> None:
        distributed = {"use_distributed_optimizer": True}
        self.start(saves, self.dir, [[20, "DISK"], [30, "MEMORY"]], distributed, path=NEW)
        self.assertEqual("20", self.text(TRACKER))
        self.assertEqual(["iter_0000020", TRACKER], self.visible())
        expected = [[[30, 210], [30.0] * 2 + [30, 30.0, 30]]]
        self.assertEqual(expected, self.start(loads, self.dir, distributed, path=NEW), self.log)

    def test_run_that_was_loaded_from_elsewhere_goes_on(self) -> None:
        pretrained = os.path.join(self.base, "pretrained")
        os.mkdir(pretrained)
        self.start(saves_without_us, pretrained, 3, path=NEW)
        elsewhere = {"load": pretrained}
        self.assertEqual([[3, 0], [3.0] * 2 + [3, 0.0, 3]], self.start(loads, self.dir, elsewhere, path=NEW)[0])
        self.start(saves, self.dir, [[4, "MEMORY"]], elsewhere, path=NEW)
        self.assertEqual([4, 28], self.start(loads, self.dir, elsewhere, path=NEW)[0][0], self.log)

    def test_checkpoint_by_megatron_alone_is_loaded(self) -> None:
        self.start(saves, self.dir, [[20, "DISK"]], path=NEW)
        for name in os.listdir(os.path.join(self.runtime, "seg")):
            os.unlink(os.path.join(self.runtime, "seg", name))
        self.start(saves_without_us, self.dir, 40, path=NEW)
        self.assertEqual([40, 0], self.start(loads, self.dir, path=NEW)[0][0], self.log)

    def test_damaged_newest_checkpoint_is_passed_over(self) -> None:
        self.start(saves, self.dir, [[20, "DISK"], [30, "DISK"]], path=NEW)
        for name in os.listdir(os.path.join(self.runtime, "seg")):
            os.unlink(os.path.join(self.runtime, "seg", name))
        with open(os.path.join(self.dir, "iter_0000030", "mp_rank_00", "model_optim_rng.pt"), "r+b") as f:
            f.truncate(100)
        self.assertEqual([20, 140], self.start(loads, self.dir, path=NEW)[0][0], self.log)

    def test_data_parallel_rank_gets_what_it_did_not_save(self) -> None:
        distributed = {"use_distributed_optimizer": True}
        self.start(saves, self.dir, [[10, "MEMORY"]], distributed, ranks=2, path=NEW)
        self.assertEqual([], self.visible())
        first, second = self.start(loads, self.dir, distributed, ranks=2, path=NEW)
        self.assertEqual([[10, 70], [10.0] * 2 + [10, 10.0, 10]], first, self.log)
        self.assertEqual([[10, 70], [10.0] * 2 + [10, 0.0, 10]], second, "rank 1 does not load the parameter state")

    def test_disk_save_of_two_ranks(self) -> None:
        distributed = {"use_distributed_optimizer": True}
        self.assertEqual([[True, 10]] * 2,
                         self.start(saves, self.dir, [[10, "DISK"]], distributed, ranks=2, path=NEW), self.log)
        expected = [[[10, 70], [10.0] * 2 + [10, 10.0, 10]]]
        self.assertEqual(expected, self.start(loads_without_us, self.dir, path=NEW))

    def test_retention_is_megatrons(self) -> None:
        steps = [[step, "DISK"] for step in (10, 15, 20, 25)]
        self.start(saves, self.dir, steps, {"save_retain_interval": 10}, path=NEW)
        self.assertEqual(["iter_0000010", "iter_0000020", "iter_0000025", TRACKER], self.visible(), self.log)


class Versions(JobCase):
    def test_before_0_5(self) -> None:
        self.start(saves, self.dir, [[10, "DISK"], [20, "MEMORY"]], path=OLD)
        self.assertEqual("10", self.text(TRACKER))
        self.assertEqual([20, [20.0] * 2], self.start(loads, self.dir, path=OLD)[0])
        self.assertEqual([[20, 0], [20.0] * 2], self.start(loads, self.dir, {}, "megatron_dist_ckpt", path=OLD)[0])

    def test_customers_example(self) -> None:
        self.assertEqual([[[0, 0]]], self.start(customers_example, self.dir, path=NEW), self.log)
        self.assertEqual("6", self.text(TRACKER))
        self.assertEqual([7, 11], self.start(loads, self.dir, {}, "megatron_dist_ckpt", path=NEW)[0][0])


def refusals(directory: str) -> List[str]:
    from dlrover.python.common.storage import PosixDiskStorage
    from dlrover.trainer.torch.flash_checkpoint import megatron

    class Own(PosixDiskStorage):
        pass

    checkpointing, *state = _begin(directory)
    texts = []
    for args, kwargs in [({}, {"storage_type": 2}), ({"ckpt_format": "torch_dist"}, {}), ({"use_dist_ckpt": True}, {}),
                         ({"save": None}, {}), ({}, {"release": True}), ({}, {"storage": Own()})]:
        checkpointing._ARGS = megatron_args(directory, **{k: v for k, v in args.items() if k != "save"})
        if "save" in args:
            checkpointing._ARGS.save = None
        try:
            megatron.save_checkpoint(1, *state, **kwargs)
            texts.append("")
        except (ValueError, TypeError) as e:
            texts.append(str(e))
    return texts


def only_its_own_thread(directory: str) -> List[Any]:
    """What another thread sees, and what is left when Megatron fails, while a save is under way."""
    import torch

    from dlrover.trainer.torch.flash_checkpoint import megatron

    checkpointing, *state = _begin(directory, use_distributed_optimizer=True)
    core = __import__("megatron.core.optimizer", fromlist=["torch"])
    before = {m: dict(vars(m)) for m in (checkpointing, core)}
    torch_before = dict(vars(torch))
    seen = []

    def other():
        path = os.path.join(directory, "iter_0000001", "other.pt")
        checkpointing.ensure_directory_exists(path)
        checkpointing.torch.save([1], path)
        seen.extend([checkpointing.torch.load(path), checkpointing.get_checkpoint_tracker_filename("x")])

    def fail(*args):
        seen.append(isinstance(torch.zeros(1), checkpointing.torch.Tensor))
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        raise RuntimeError("no room")

    with mock.patch.object(state[2], "state_dict", fail):
        try:
            megatron.save_checkpoint(1, *state)
        except RuntimeError as e:
            seen.append(str(e))
    unchanged = all(vars(m) == names for m, names in before.items()) and dict(vars(torch)) == torch_before
    return seen + [unchanged]


class Manners(JobCase):
    def test_refusals(self) -> None:
        texts = self.start(refusals, self.dir, path=NEW)[0]
        for want, text in zip(["storage_type", "--ckpt-format torch", "--ckpt-format torch", "--save", "release",
                               "Own"], texts):
            self.assertIn(want, text)

    def test_other_threads_and_failures(self) -> None:
        self.assertEqual([[True, [1], "x/" + TRACKER, "no room", True]],
                         self.start(only_its_own_thread, self.dir, path=NEW), self.log)

    def test_without_megatron(self) -> None:
        with mock.patch.dict("sys.modules", {"megatron": None}):
            from dlrover.trainer.torch.flash_checkpoint import megatron

            with self.assertRaisesRegex(ImportError, "PYTHONPATH"):
                megatron.checkpointing_module()


if __name__ == "__main__":
    unittest.main()
