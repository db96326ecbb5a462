"""FSDP checkpointers: training goes on after a restart as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import unittest
from typing import Any, Dict, List
from unittest import mock

from tests import torch2_ranks as ranks


def setUpModule() -> None:
    ranks.need()


def _model(kind: str) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 6, bias=False))
    if kind == "fsdp2":
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError:
            from torch.distributed._composable.fsdp import fully_shard
        for layer in (model[0], model[2]):
            fully_shard(layer)
        return fully_shard(model)
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=kind == "fsdp1-orig", device_id=torch.device("cpu"))


def _job(kind: str) -> Any:
    import torch

    model = _model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def _train(job: Any, first: int, last: int) -> List[str]:
    import torch
    import torch.distributed as dist

    model, optimizer, scheduler = job
    losses = []
    for step in range(first, last + 1):
        torch.manual_seed(step * 100 + dist.get_rank())
        x = torch.randn(4, 6)
        loss = ((model(x) - x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item().hex())
    return losses


def _checkpointer(name: str, directory: str) -> Any:
    from dlrover.trainer.torch.flash_checkpoint import fsdp

    return getattr(fsdp, name)(directory)


def complaint(directory: str, kind: str) -> str:
    """Why torch alone cannot train such a model on CPUs and take its state; empty if it can."""
    try:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        model, optimizer, _ = job = _job(kind)
        _train(job, 1, 1)
        get_optimizer_state_dict(model, optimizer)
    except Exception as error:
        return "%s needs more than CPUs in this torch: %s" % (kind, error)
    return ""


def curve(directory: str, name: str, kind: str, storage: str) -> Dict[str, Any]:
    from dlrover.trainer.torch.flash_checkpoint.fsdp import StorageType

    home = os.path.join(directory, "-".join((name, kind, storage)))
    job = _job(kind)
    checkpointer = _checkpointer(name, home)
    _train(job, 1, 3)
    extra = {"scheduler": job[2].state_dict(), "epoch": 4, "list": [1, {"a": (2, 3)}]}
    checkpointer.save_checkpoint(3, job[0], job[1], extra, storage_type=StorageType[storage])
    if storage == "DISK":
        checkpointer.wait_latest_checkpoint(60)
    undisturbed = _train(job, 4, 6)
    other = _job(kind)
    again = _checkpointer(name, home)
    found = again.load_checkpoint(other[0], other[1], os.path.join(home, "3", "" if "Shard" in name else "rank_0.pt")
                                  if storage == "DISK" else "")
    other[2].load_state_dict(found["scheduler"])
    return {"same": _train(other, 4, 6) == undisturbed, "epoch": found["epoch"], "list": found["list"],
            "keys": sorted(found), "different": undisturbed != _train(_job(kind), 4, 6)}


def curves(directory: str, kinds: List[str], names: List[str]) -> Dict[str, Any]:
    return {"%s %s %s" % (kind, name, storage): curve(directory, name, kind, storage)
            for kind in kinds for name in names for storage in ("MEMORY", "DISK")}


def save_two_steps(directory: str) -> List[str]:
    job = _job("fsdp2")
    checkpointer = _checkpointer("FsdpShardCheckpointer", directory)
    _train(job, 1, 2)
    checkpointer.save_checkpoint(2, *job[:2])
    checkpointer.wait_latest_checkpoint(60)
    return _whole_state(job[0])


def load_steps(directory: str) -> List[str]:
    job = _job("fsdp2")
    _checkpointer("FsdpShardCheckpointer", directory).load_checkpoint(*job[:2])
    return _whole_state(job[0])


def _whole_state(model: Any) -> List[str]:
    import torch

    return [bytes(p.full_tensor().detach().contiguous().view(-1).view(torch.uint8).tolist()).hex()
            for p in model.parameters()]


def guide(directory: str) -> Dict[str, Any]:
    """The calls with a state dict and a storage reader."""
    import torch.distributed.checkpoint as stock

    from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpShardCheckpointer, StorageType

    out: Dict[str, Any] = {}
    job = _job("fsdp2")
    checkpointer = FsdpShardCheckpointer(directory)
    out["nothing"] = checkpointer.get_storage_reader() is None and checkpointer.load_checkpoint(*job[:2]) == {}
    for step, kind in ((1, StorageType.MEMORY), (2, StorageType.DISK)):
        _train(job, step, step)
        state_dict = {"model": job[0].state_dict(), "step": step}
        ckpt_dir = os.path.join(directory, str(step))
        checkpointer.save_checkpoint(step, state_dict, ckpt_dir, storage_type=kind)
        target = {"model": _job("fsdp2")[0].state_dict(), "step": 0}
        reader = checkpointer.get_storage_reader()
        stock.load(target, storage_reader=reader)
        out[kind.name] = target["step"] == step and all(
            ranks.same(a.full_tensor(), b.full_tensor())
            for a, b in zip(target["model"].values(), state_dict["model"].values()))
    for step in range(3, 12):  # every segment is used again, also after an object has outgrown its place
        _train(job, step, step)
        state_dict = {"model": job[0].state_dict(), "step": step, "text": "x" * 300 * step}
        checkpointer.save_checkpoint(step, state_dict, os.path.join(directory, str(step)), StorageType.MEMORY)
    target = {"model": _job("fsdp2")[0].state_dict(), "step": 0, "text": ""}
    stock.load(target, storage_reader=checkpointer.get_storage_reader())
    out["again"] = target["text"] == "x" * 3300 and target["step"] == 11 and all(
        ranks.same(a.full_tensor(), b.full_tensor())
        for a, b in zip(target["model"].values(), state_dict["model"].values()))
    checkpointer.wait_latest_checkpoint(60)
    with open(os.path.join(directory, "dlrover_latest.txt")) as f:
        out["tracker"] = f.read()
    try:
        checkpointer.save_checkpoint(3, state_dict, ckpt_dir, storage_type=2)
    except ValueError:
        out["bad type"] = "ValueError"
    return out


def engine(directory: str) -> Dict[str, Any]:
    """DLRover's engine by itself: memory, disk, and None for a path."""
    import torch.distributed.checkpoint as stock

    from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpCheckpointEngine, get_checkpoint_storage

    job = _job("fsdp2")
    flash = FsdpCheckpointEngine(directory, get_checkpoint_storage())
    out: Dict[str, Any] = {"nothing": flash.load() is None, "shards": flash.get_global_shard_num()}
    for step, save in ((1, flash.save_to_storage), (2, flash.save_to_memory)):
        _train(job, step, step)
        state_dict = {"model": job[0].state_dict(), "step": step}
        assert save(step, state_dict, {"model_states": os.path.join(directory, str(step))})
        flash.wait_latest_checkpoint(60)
        target = {"model": _job("fsdp2")[0].state_dict(), "step": 0}
        stock.load(target, storage_reader=flash.load(None))
        out["step %d" % step] = target["step"] == step == flash.latest_step and all(
            ranks.same(a.full_tensor(), b.full_tensor())
            for a, b in zip(target["model"].values(), state_dict["model"].values()))
    full = _checkpointer("FsdpFullCheckpointer", os.path.join(directory, "full"))
    out["none"] = full.load_checkpoint(*job[:2], resume_path=None) == {}
    return out


class Fsdp(unittest.TestCase):
    def setUp(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="fsdp-")
        self.addCleanup(shutil.rmtree, self.directory)

    def run_ranks(self, function: str, world: int, **arguments: Any) -> List[Any]:
        return ranks.run("tests.test_torch2_fsdp", function, world, self.directory, **arguments)

    def need(self, kind: str) -> None:
        import torch

        if not hasattr(torch.cpu.Stream, "record_event"):  # with it all of them can
            reason = self.run_ranks("complaint", 2, kind=kind)[0]
            if reason:
                self.skipTest(reason)

    def check_curves(self, **arguments: Any) -> None:
        for kind in arguments["kinds"]:
            self.need(kind)
        for result in self.run_ranks("curves", 2, **arguments):
            for name, one in result.items():
                with self.subTest(name):
                    self.assertEqual(one, {"same": True, "epoch": 4, "list": one["list"], "different": True,
                                           "keys": ["epoch", "list", "scheduler"]})
                    self.assertEqual(one["list"][1]["a"], [2, 3])

    def test_fully_shard_trains_on_bit_for_bit(self) -> None:
        self.check_curves(kinds=["fsdp2"], names=["FsdpShardCheckpointer", "FsdpFullCheckpointer"])

    def test_fully_sharded_data_parallel_trains_on_bit_for_bit(self) -> None:
        self.check_curves(kinds=["fsdp1"], names=["FsdpShardCheckpointer"])

    def test_fully_sharded_data_parallel_with_original_parameters(self) -> None:
        self.check_curves(kinds=["fsdp1-orig"], names=["FsdpShardCheckpointer"])

    def test_fully_sharded_data_parallel_full_state(self) -> None:
        self.check_curves(kinds=["fsdp1"], names=["FsdpFullCheckpointer"])

    def test_a_save_changes_nothing_with_an_old_torch(self) -> None:
        import torch

        from dlrover.trainer.torch.flash_checkpoint import fsdp

        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        old = mock.Mock(optim_state_dict=lambda m, o: o.state_dict())
        with mock.patch.object(fsdp, "_states", return_value=None), \
                mock.patch.object(fsdp, "_old_fsdp", return_value=(old, contextlib.nullcontext())):
            fsdp._optimizer_state(model, optimizer)
        self.assertFalse(optimizer.state)
        self.assertTrue(all(torch.equal(v, before[k]) for k, v in model.state_dict().items()))

    def test_another_world_size_loads_from_disk(self) -> None:
        self.need("fsdp2")
        saved = self.run_ranks("save_two_steps", 2)[0]
        for world in (1, 3):
            for loaded in self.run_ranks("load_steps", world):
                self.assertEqual(loaded, saved)

    def test_state_dict_and_storage_reader(self) -> None:
        self.need("fsdp2")
        for result in self.run_ranks("guide", 2):
            self.assertEqual(result, {"nothing": True, "MEMORY": True, "DISK": True, "again": True, "tracker": "2",
                                      "bad type": "ValueError"})

    def test_engine(self) -> None:
        self.need("fsdp2")
        for result in self.run_ranks("engine", 2):
            self.assertEqual(result, {"nothing": True, "shards": 2, "step 1": True, "step 2": True, "none": True})


if __name__ == "__main__":
    unittest.main()
