"""DeepSpeed jobs that are stopped and started again: with an engine of our own making, and with DeepSpeed itself."""

from __future__ import annotations

import glob
import importlib.util
import os
import unittest
from typing import Any, List, Optional

from tests.adapters_jobs import JobCase


class _TorchCheckpointEngine:
    def __init__(self) -> None:
        self.created = []

    def create(self, info):
        self.created.append(info)

    def makedirs(self, path, exist_ok=False):
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict, path):
        import torch

        torch.save(state_dict, path)

    def load(self, path, map_location=None):
        import torch

        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info):
        return True

    def is_data_parallel_writer(self, dp_rank):
        return dp_rank == 0


class _Engine:
    """As much of a DeepSpeedEngine as checkpoints need; ZeRO stage 1 or 2, so that only rank 0 saves the model."""

    has_moe_layers = False

    def __init__(self, value: float, fail: bool = False) -> None:
        import torch
        import torch.distributed as dist

        distributed = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        self.module = torch.nn.Linear(3, 2)
        self.partition = torch.full((4,), value + self.rank)
        self.global_steps = int(value)
        self.checkpoint_engine = _TorchCheckpointEngine()
        self.fail = fail
        with torch.no_grad():
            for p in self.module.parameters():
                p.fill_(value)

    def zero_nvme_offload_optimizer(self):
        return False

    def load_universal_checkpoint(self):
        return False

    def _get_ckpt_name(self, checkpoints_path, tag, mp_placeholder=None):
        return os.path.join(checkpoints_path, str(tag), "mp_rank_%s_model_states.pt" % (mp_placeholder or "00"))

    def _get_zero_ckpt_name(self, checkpoints_path, tag):
        return os.path.join(checkpoints_path, str(tag), "zero_pp_rank_%d_mp_rank_00_optim_states.pt" % self.rank)

    def save_checkpoint(self, save_dir, tag=None, client_state={}, save_latest=True, exclude_frozen_parameters=False):
        self.checkpoint_engine.makedirs(save_dir, exist_ok=True)
        tag = str("global_step%d" % self.global_steps if tag is None else tag)
        self.checkpoint_engine.create(tag)
        self.checkpoint_engine.makedirs(os.path.join(save_dir, tag), exist_ok=True)
        if self.checkpoint_engine.is_data_parallel_writer(self.rank):
            state = dict(module=self.module.state_dict(), global_steps=self.global_steps, **client_state)
            self.checkpoint_engine.save(state_dict=state, path=self._get_ckpt_name(save_dir, tag))
        if self.fail:
            raise RuntimeError("no room")
        self.checkpoint_engine.save({"partition": self.partition}, self._get_zero_ckpt_name(save_dir, tag))
        with open(os.path.join(save_dir, "zero_to_fp32.py"), "w"):
            pass
        self.checkpoint_engine.commit(tag)
        if save_latest and self.rank == 0:
            with open(os.path.join(save_dir, "latest"), "w") as f:
                f.write(tag)
        return True

    def load_checkpoint(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True,
                        load_lr_scheduler_states=True, load_module_only=False, custom_load_fn=None):
        if tag is None:
            latest = os.path.join(load_dir, "latest")
            if not os.path.isfile(latest):
                return None, None
            with open(latest) as f:
                tag = f.read().strip()
        names = sorted(glob.glob(self._get_ckpt_name(load_dir, tag, "*")))
        if not names:
            return None, None
        state = self.checkpoint_engine.load(names[0], map_location=lambda storage, location: storage)
        self.module.load_state_dict(state.pop("module"), strict=load_module_strict)
        self.global_steps = state.pop("global_steps")
        name = self._get_zero_ckpt_name(load_dir, tag)
        if load_optimizer_states and not load_module_only and os.path.exists(name):
            self.partition.copy_(self.checkpoint_engine.load(name, map_location="cpu")["partition"])
        return names[0], state


def saves(directory: str, saves: List[List[Any]], tag: str = "%d") -> List[Any]:
    """Saves [step, storage type] one after the other and waits for the disk."""
    from dlrover.trainer.torch.flash_checkpoint.deepspeed import DeepSpeedCheckpointer, StorageType

    results: List[Any] = []
    checkpointer = None
    for step, storage_type in saves:
        engine = _Engine(step)
        own = engine.checkpoint_engine
        if checkpointer is None:
            checkpointer = DeepSpeedCheckpointer(engine, directory)
        checkpointer.engine = engine
        results.append(checkpointer.save_checkpoint(directory, tag % step if tag else None, {"note": "n%d" % step},
                                                    storage_type=StorageType[storage_type]))
        assert engine.checkpoint_engine is own
        if storage_type == "DISK":
            results.append(checkpointer.wait_latest_checkpoint(timeout=60))
    return results


def loads(directory: str, tag: Optional[str] = None) -> List[Any]:
    from dlrover.trainer.torch.flash_checkpoint.deepspeed import DeepSpeedCheckpointer

    engine = _Engine(0)
    own = engine.checkpoint_engine
    path, state = DeepSpeedCheckpointer(engine, directory).load_checkpoint(directory, tag)
    assert engine.checkpoint_engine is own
    return [path and os.path.relpath(path, directory), state, float(next(engine.module.parameters()).min()),
            float(engine.partition.min()), engine.global_steps]


def loads_without_us(directory: str) -> Any:
    engine = _Engine(0)
    engine.load_checkpoint(directory)
    return [float(next(engine.module.parameters()).min()), float(engine.partition.min())]


def saves_without_us(directory: str, step: int) -> None:
    _Engine(step).save_checkpoint(directory, step)


def refusals(directory: str) -> List[str]:
    from dlrover.trainer.torch.flash_checkpoint.deepspeed import DeepSpeedCheckpointer

    engine = _Engine(0)
    own = engine.checkpoint_engine
    checkpointer = DeepSpeedCheckpointer(engine, directory)
    texts = []

    def refused(call):
        try:
            call()
            texts.append("")
        except (ValueError, RuntimeError) as e:
            texts.append(str(e))

    refused(lambda: checkpointer.save_checkpoint(directory, 1, storage_type=2))
    refused(lambda: checkpointer.save_checkpoint(directory + "2", 1))
    engine.fail = True
    refused(lambda: checkpointer.save_checkpoint(directory, 1))
    assert engine.checkpoint_engine is own
    engine.zero_nvme_offload_optimizer = lambda: True
    refused(lambda: DeepSpeedCheckpointer(engine, directory))
    engine.zero_nvme_offload_optimizer = lambda: False
    engine.checkpoint_engine = None
    refused(lambda: DeepSpeedCheckpointer(engine, directory))
    return texts


class Restart(JobCase):
    def test_memory_saves_show_nothing_on_disk_and_are_loaded(self) -> None:
        self.assertEqual([[True]], self.start(saves, self.dir, [[10, "MEMORY"]]), self.log)
        self.assertEqual(["zero_to_fp32.py"], self.visible())
        expected = ["10/mp_rank_00_model_states.pt", {"note": "n10"}, 10.0, 10.0, 10]
        self.assertEqual([expected], self.start(loads, self.dir), self.log)

    def test_disk_save_is_deepspeeds_own(self) -> None:
        self.assertEqual([[True, 20, True]], self.start(saves, self.dir, [[20, "DISK"], [30, "MEMORY"]]), self.log)
        self.assertEqual(["20", "latest", "zero_to_fp32.py"], self.visible())
        self.assertEqual("20", self.text("latest"))
        self.assertEqual([[20.0, 20.0]], self.start(loads_without_us, self.dir))
        self.assertEqual([30.0, 30.0, 30], self.start(loads, self.dir)[0][2:], self.log)
        self.assertEqual([20.0, 20.0, 20], self.start(loads, self.dir, "20")[0][2:], self.log)

    def test_tags_with_names(self) -> None:
        self.assertEqual([[True, 20]], self.start(saves, self.dir, [[20, "DISK"]], ""), self.log)
        self.assertEqual("global_step20", self.text("latest"))
        self.assertEqual("20", self.text("dlrover_latest.txt"))
        self.assertEqual(20, self.start(loads, self.dir)[0][4], self.log)

    def test_nothing_to_load(self) -> None:
        os.mkdir(self.dir)
        self.assertEqual([[None, None, 0.0, 0.0, 0]], self.start(loads, self.dir), self.log)

    def test_ranks_get_the_model_that_rank_0_saved(self) -> None:
        self.start(saves, self.dir, [[10, "MEMORY"]], ranks=3)
        self.assertEqual([[10.0, 10.0 + rank, 10] for rank in range(3)],
                         [values[2:] for values in self.start(loads, self.dir, ranks=3)], self.log)

    def test_disk_save_of_two_ranks(self) -> None:
        self.assertEqual([[True, 10]] * 2, self.start(saves, self.dir, [[10, "DISK"]], ranks=2), self.log)
        self.assertEqual([[10.0, 10.0], [10.0, 11.0]], self.start(loads_without_us, self.dir, ranks=2))

    def test_checkpoint_by_deepspeed_alone_is_loaded(self) -> None:
        self.start(saves, self.dir, [[20, "DISK"]])
        for name in os.listdir(os.path.join(self.runtime, "seg")):
            os.unlink(os.path.join(self.runtime, "seg", name))
        self.start(saves_without_us, self.dir, 40)
        self.assertEqual(40, self.start(loads, self.dir)[0][4], self.log)

    def test_refusals(self) -> None:
        for want, text in zip(["storage_type", "make another", "no room", "NVMe", "0.7"],
                              self.start(refusals, self.dir)[0]):
            self.assertIn(want, text)


def _real_engine(stage: int) -> Any:
    import deepspeed
    import torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True},
              "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config,
                                dist_init_required=False)[0]


def _train(engine: Any, steps: int) -> List[float]:
    """The losses of some steps: equal when the state at their start was equal."""
    import torch

    losses = []
    for step in range(steps):
        make = torch.Generator().manual_seed(engine.global_steps)
        loss = engine(torch.randn(2, 8, generator=make).bfloat16()).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def _real(directory: str, stage: int) -> Any:
    import deepspeed

    from dlrover.trainer.torch.flash_checkpoint.deepspeed import DeepSpeedCheckpointer

    deepspeed.init_distributed("gloo")
    engine = _real_engine(stage)
    return engine, DeepSpeedCheckpointer(engine, directory)


def trains(directory: str, stage: int) -> List[float]:
    from dlrover.trainer.torch.flash_checkpoint.deepspeed import StorageType

    engine, checkpointer = _real(directory, stage)
    _train(engine, 2)
    checkpointer.save_checkpoint(directory, engine.global_steps, {"epoch": 1}, storage_type=StorageType.DISK)
    checkpointer.wait_latest_checkpoint(60)
    _train(engine, 1)
    checkpointer.save_checkpoint(directory, engine.global_steps, {"epoch": 2}, storage_type=StorageType.MEMORY)
    return _train(engine, 2)


def resumes(directory: str, stage: int) -> Any:
    engine, checkpointer = _real(directory, stage)
    path, state = checkpointer.load_checkpoint(directory)
    return [os.path.relpath(path, directory).split("/")[0], state["epoch"], engine.global_steps, _train(engine, 2)]


def resumes_without_us(directory: str, stage: int) -> Any:
    engine, checkpointer = _real(directory, stage)
    path, state = engine.load_checkpoint(directory)
    return [state["epoch"], engine.global_steps, _train(engine, 3)[1:]]


@unittest.skipUnless(importlib.util.find_spec("deepspeed"), "DeepSpeed is not installed")
class RealDeepSpeed(JobCase):
    def check(self, stage: int) -> None:
        expected = self.start(trains, self.dir, stage, ranks=2)
        self.assertEqual("2", self.text("latest"))
        self.assertEqual([["3", 2, 3, losses] for losses in expected], self.start(resumes, self.dir, stage, ranks=2),
                         self.log)
        self.assertEqual([[1, 2, losses] for losses in expected],
                         self.start(resumes_without_us, self.dir, stage, ranks=2), self.log)

    def test_zero_1(self) -> None:
        self.check(1)

    def test_zero_2(self) -> None:
        self.check(2)

    def test_zero_3(self) -> None:
        self.check(3)


if __name__ == "__main__":
    unittest.main()
