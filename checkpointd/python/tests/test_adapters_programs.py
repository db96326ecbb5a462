"""Programs that use DLRover's smaller parts by themselves, and are stopped and started again."""

from __future__ import annotations

import os
import tempfile
import unittest
from types import SimpleNamespace
from typing import Any, List
from unittest import mock

from tests.adapters_jobs import JobCase
from tests.test_adapters_megatron import NEW, TRACKER, _begin, _fill, _values

# Megatron-LM, with torch.save and torch.load replaced by the program.


def megatron_saves(directory: str, step: int, to: str, distributed: bool = False) -> Any:
    import torch

    from dlrover.trainer.torch.flash_checkpoint.megatron import MegatronCheckpointer

    checkpointing, *state = _begin(directory, use_distributed_optimizer=distributed)
    checkpointer = MegatronCheckpointer.singleton_instance(directory, save_timeout=60)
    assert MegatronCheckpointer.singleton_instance() is checkpointer
    _fill(*state, value=step)
    with mock.patch.object(torch, "save", checkpointer.save):
        checkpointing.save_checkpoint(step, *state, 7 * step)
    checkpointer.update_tracer_file(step)
    saved = getattr(checkpointer.engine, "save_to_" + to)(step, checkpointer.state_dict, checkpointer.paths)
    names = sorted(checkpointer.state_dict)
    checkpointer.state_dict.clear()
    if to == "storage":
        checkpointer.engine.wait_latest_checkpoint(timeout=60)
    return [saved, names, checkpointer.engine.latest_step]


def megatron_loads(directory: str, distributed: bool = False) -> Any:
    import torch

    from dlrover.trainer.torch.flash_checkpoint.megatron import MegatronCheckpointer

    checkpointing, *state = _begin(directory, use_distributed_optimizer=distributed)
    checkpointer = MegatronCheckpointer.singleton_instance(directory)
    with mock.patch.object(torch, "load", checkpointer.load):
        return [checkpointing.load_checkpoint(*state), _values(*state)]


def megatron_tracker(directory: str) -> List[str]:
    """What update_tracer_file leaves of a directory."""
    from dlrover.trainer.torch.flash_checkpoint.megatron import MegatronCheckpointer

    def put(name: str, text: str) -> None:
        os.makedirs(os.path.dirname(os.path.join(directory, name)), exist_ok=True)
        with open(os.path.join(directory, name), "w") as f:
            f.write(text)

    def got() -> str:
        try:
            with open(os.path.join(directory, TRACKER)) as f:
                return f.read()
        except FileNotFoundError:
            return ""

    checkpointer = MegatronCheckpointer(directory)
    out = []
    put(TRACKER, "5")
    put("iter_0000005/mp_rank_00/model_optim_rng.pt", "Megatron's own")
    os.makedirs(os.path.join(directory, "iter_0000005", "mp_rank_01"))
    checkpointer.update_tracer_file(6)
    out.append(got())
    put("dlrover_latest.txt", "4")
    checkpointer.update_tracer_file(5)
    out.append(got())
    out.append(" ".join(sorted(os.listdir(os.path.join(directory, "iter_0000005")))))
    os.remove(os.path.join(directory, "dlrover_latest.txt"))
    checkpointer.update_tracer_file(4)
    return out + [got()]


def megatron_refuses(directory: str) -> List[str]:
    from dlrover.trainer.torch.flash_checkpoint.megatron import MegatronCheckpointer

    checkpointer = MegatronCheckpointer(directory)
    try:
        checkpointer.save({}, os.path.join(directory, "other.pt"))
        said = ""
    except ValueError as e:
        said = str(e)
    with tempfile.TemporaryFile() as f:
        checkpointer.save({"a": 1}, f)
        f.seek(0)
        return [said, checkpointer.load(f), checkpointer.load(os.path.join(directory, "iter_1", "model_optim_rng.pt"))]


class Megatron(JobCase):
    def test_memory(self) -> None:
        self.assertEqual([[True, ["model_states"], 10]], self.start(megatron_saves, self.dir, 10, "storage", path=NEW))
        self.assertEqual(["iter_0000010", TRACKER], self.visible())
        self.assertEqual("10", self.text(TRACKER))
        self.start(megatron_saves, self.dir, 20, "memory", path=NEW)
        self.assertEqual((["iter_0000010", TRACKER], "10"), (self.visible(), self.text(TRACKER)), "as it was")
        self.assertEqual([[[20, 140], [20.0] * 2 + [20, 0.0, 20]]], self.start(megatron_loads, self.dir, path=NEW),
                         self.log)

    def test_disk(self) -> None:
        self.start(megatron_saves, self.dir, 10, "storage", True, path=NEW)
        for name in os.listdir(os.path.join(self.runtime, "seg")):
            os.unlink(os.path.join(self.runtime, "seg", name))
        self.assertEqual([[[10, 70], [10.0] * 2 + [10, 10.0, 10]]],
                         self.start(megatron_loads, self.dir, True, path=NEW), self.log)

    def test_the_optimizer_is_loaded_by_the_rank_that_saved_it(self) -> None:
        """Rank 1 has no files of its own; only rank 0 asks for the optimizer, which must not wait for the other."""
        results = self.start(megatron_saves, self.dir, 10, "memory", True, ranks=2, path=NEW)
        self.assertEqual([["model_states", "optim_states"], []], [names for _, names, _ in results], self.log)
        self.start(megatron_saves, self.dir, 8, "storage", True, ranks=2, path=NEW)
        self.start(megatron_saves, self.dir, 12, "memory", True, ranks=2, path=NEW)
        self.assertEqual([[[12, 84], [12.0] * 2 + [12, value, 12]] for value in (12.0, 0.0)],
                         self.start(megatron_loads, self.dir, True, ranks=2, path=NEW), self.log)

    def test_the_tracker(self) -> None:
        self.assertEqual([["5", "4", "mp_rank_00", ""]], self.start(megatron_tracker, self.dir, path=NEW), self.log)

    def test_other_files(self) -> None:
        (said, loaded, missing), = self.start(megatron_refuses, self.dir, path=NEW)
        self.assertIn("model_optim_rng.pt or distrib_optim.pt", said)
        self.assertEqual(({"a": 1}, {}), (loaded, missing))


# Distributed optimizers, as Megatron describes them.


def _optimizer(value: float, rank: int, parameters: int = 3) -> Any:
    """Its parameters are in two groups and two buckets; each rank has a part of each."""
    import torch

    models = [torch.nn.Parameter(torch.zeros(8)) for _ in range(parameters)]
    mains = [torch.nn.Parameter(torch.full((4,), value + rank + i / 4)) for i in range(parameters)]
    inner = torch.optim.Adam([{"params": mains[:1]}, {"params": mains[1:]}])
    for main in mains:
        inner.state[main] = {"exp_avg": torch.full((4,), 2 * value), "exp_avg_sq": torch.full((4,), 3 * value)}
    buckets = [{"param_map": dict.fromkeys(models[:2])}, {"param_map": dict.fromkeys(models[2:])}]
    places = {m: (0, 0) if i == 0 else (1, i - 1) for i, m in enumerate(models)}
    return SimpleNamespace(optimizer=inner, gbuf_ranges=[{(torch.float, torch.float): buckets}],
                           model_param_group_index_map=places)


def _chain(value: float, rank: int) -> Any:
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(), _optimizer(value, rank)])


def _contents(chain: Any) -> List[float]:
    inner = chain.chained_optimizers[1].optimizer
    mains = [main for group in inner.param_groups for main in group["params"]]
    return [float(m.sum()) for m in mains] + [float(t.sum()) for m in mains for t in inner.state[m].values()]


def dist_saves(directory: str, step: int, to: str) -> Any:
    import torch.distributed as dist

    from dlrover.trainer.torch.flash_checkpoint import megatron_dist_ckpt as flash

    checkpointer = flash.MegatronDistCheckpointer.singleton_instance(directory, use_distributed_optimizer=True)
    assert type(checkpointer.engine) is flash.MegatronDistCheckpointEngine
    chain = _chain(step, dist.get_rank())
    path = flash.get_dist_optimizer_checkpoint_name(directory, step)
    name = flash.CheckpointConstant.OPTIM_STATES_NAME
    save = getattr(checkpointer.engine, "save_to_" + to)
    assert save(step, {name: flash.get_chained_optimizer_parameter_state(chain)}, {name: path})
    if to == "storage":
        checkpointer.engine.wait_latest_checkpoint(60)
    return [os.path.relpath(path, directory), _contents(chain)]


def dist_loads(directory: str) -> Any:
    import torch
    import torch.distributed as dist

    from dlrover.trainer.torch.flash_checkpoint import megatron_dist_ckpt as flash

    checkpointer = flash.MegatronDistCheckpointer.singleton_instance(directory, use_distributed_optimizer=True)
    chain = _chain(0, 0)
    step, states = checkpointer.engine.load()
    if step:
        state = states["optim_states"]
    else:
        state = torch.load(flash.get_dist_optimizer_checkpoint_name(directory, 10), weights_only=False)
    flash.load_chained_optimizer_parameter_state(chain, state)
    return [step, _contents(chain), dist.get_rank()]


class Distributed(JobCase):
    def test_each_rank_gets_its_part(self) -> None:
        saved = self.start(dist_saves, self.dir, 10, "storage", ranks=2)
        self.assertEqual(["iter_0000010/rank_%05d/distrib_optim.pt" % rank for rank in (0, 1)], [s[0] for s in saved])
        self.assertEqual("10", self.text(TRACKER))
        self.assertEqual([[10, s[1], rank] for rank, s in enumerate(saved)], self.start(dist_loads, self.dir, ranks=2))
        newer = self.start(dist_saves, self.dir, 20, "memory", ranks=2)
        self.assertEqual([[20, s[1], rank] for rank, s in enumerate(newer)], self.start(dist_loads, self.dir, ranks=2))
        for name in os.listdir(os.path.join(self.runtime, "seg")):
            os.unlink(os.path.join(self.runtime, "seg", name))
        self.assertEqual([[0, s[1], rank] for rank, s in enumerate(saved)], self.start(dist_loads, self.dir, ranks=2))

    def test_states_of_another_optimizer(self) -> None:
        from dlrover.trainer.torch.flash_checkpoint import megatron_dist_ckpt as flash

        with self.assertRaisesRegex(KeyError, "any state for parameter 1 of group 1 in bucket 1"):
            flash.load_parameter_state_from_state_dict(_optimizer(1, 0), flash.get_parameter_state(_optimizer(1, 0, 2)))
        state = flash.get_parameter_state(_optimizer(1, 0))
        del state[0][0][0]["exp_avg"]
        with self.assertRaisesRegex(KeyError, "no exp_avg for parameter 0"):
            flash.load_parameter_state_from_state_dict(_optimizer(1, 0), state)
        with self.assertRaisesRegex(ValueError, "states of 0 optimizers for a chain of 2"):
            flash.load_chained_optimizer_parameter_state(_chain(1, 0), None)


# Trainers of one's own, with the checkpointers for Hugging Face, DeepSpeed's and the plain engines.


def hf_saves(directory: str, step: int, to: str) -> Any:
    import torch
    import torch.distributed as dist

    from dlrover.trainer.torch.flash_checkpoint.hf_trainer import HfDdpCheckpointer

    checkpointer = HfDdpCheckpointer(directory)
    rank = dist.get_rank()
    out = []
    for at in (step - 1, step):
        where = os.path.join(directory, "checkpoint-%d" % at)
        if rank == 0:
            weights = {"weight": torch.full((3,), float(at))}
            checkpointer.ckpt_agent.save(weights, os.path.join(where, "pytorch_model.bin"))
        if rank == 0 and at < step:
            checkpointer.ckpt_agent.save([at], os.path.join(where, "once.pt"))
        checkpointer.ckpt_agent.save({"rank": rank}, os.path.join(where, "rng_state_%d.pth" % rank))
        out.append(getattr(checkpointer, "save_checkpoint_to_" + to)(at))
    if to == "storage":
        checkpointer.async_save_engine.wait_latest_checkpoint(60)
    return out


def hf_loads(directory: str) -> Any:
    from dlrover.trainer.torch.flash_checkpoint.hf_trainer import HfDdpCheckpointer

    state = HfDdpCheckpointer(directory).async_save_engine.load()
    return {name: value if "rng" in name else value["weight"].tolist() for name, value in sorted(state.items())}


class _DeepSpeedEngine:
    """One that saves by torch.save, as those do whose checkpoint engine is torch's."""

    def save(self, directory: str, tag: int, value: float) -> None:
        import torch

        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
            torch.save({"value": value, "of": name}, os.path.join(directory, str(tag), name))


def deepspeed_saves(directory: str, step: int, to: str) -> Any:
    import torch

    from dlrover.trainer.torch.flash_checkpoint.deepspeed import (AsyncCheckpointAgent, DeepSpeedCheckpointEngine,
                                                                  get_checkpoint_storage)

    agent = AsyncCheckpointAgent(get_checkpoint_storage())
    engine = DeepSpeedCheckpointEngine(directory, agent.storage, 1, 1)
    with mock.patch.object(torch, "save", agent.save):
        _DeepSpeedEngine().save(directory, step, step + 0.5)
    out = getattr(engine, "save_to_" + to)(step, agent.state_dict, agent.paths)
    if to == "storage":
        engine.wait_latest_checkpoint(60)
    return [out, sorted(agent.state_dict)]


def deepspeed_loads(directory: str) -> Any:
    from dlrover.trainer.torch.flash_checkpoint.deepspeed import AsyncCheckpointAgent, DeepSpeedCheckpointEngine
    from dlrover.python.common.storage import PosixDiskStorage

    agent = AsyncCheckpointAgent(PosixDiskStorage())
    agent.state_dict = DeepSpeedCheckpointEngine(directory, agent.storage).load()
    paths = [os.path.join(directory, "10", name) for name in (
        "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "none.pt")]
    return [agent.load(path) for path in paths]


def full(directory: str) -> Any:
    import torch

    from dlrover.python.common.storage import KeepLatestStepStrategy, get_checkpoint_storage
    from dlrover.trainer.torch.flash_checkpoint.ddp import FullCheckpointEngine

    engine = FullCheckpointEngine(directory, get_checkpoint_storage(KeepLatestStepStrategy(1, directory)))
    before = [engine.load(), engine.get_saving_ranks()]
    for step in (1, 2):
        path = os.path.join(directory, str(step), "model.pt")
        state = {"w": torch.full((2,), float(step))}
        assert engine.save_to_storage(step, {"model_states": state}, {"model_states": path})
        engine.wait_latest_checkpoint(60)
    engine.save_to_memory(3, {"model_states": {"w": torch.full((2,), 3.0)}}, {"model_states": path})
    try:
        engine.save_to_memory(4, {"a": {}, "b": {}}, {"a": "a", "b": "b"})
    except ValueError as e:
        before.append(str(e))
    step, state = engine.get_state_dict_from_memory()
    return before + [step, state["model_states"]["w"].tolist(), engine.load()["w"].tolist(), engine.latest_step]


def local_shards(directory: str) -> Any:
    import torch
    import torch.distributed as dist

    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

    checkpointer = DdpCheckpointer(directory, local_shard_num=2)
    old = checkpointer.load_checkpoint()
    checkpointer.save_checkpoint(3, {"w": torch.full((2,), float(dist.get_rank()))})
    checkpointer.wait_latest_checkpoint(60)
    return old and old["w"].tolist()


def storages(directory: str) -> Any:
    from dlrover.python.common.storage import KeepLatestStepStrategy
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

    plain, deleting = DdpCheckpointer(directory), DdpCheckpointer(
        directory, deletion_strategy=KeepLatestStepStrategy(2, directory))
    metas = [c.storage.get_class_meta() for c in (plain, deleting)]
    return [[m.module_path, m.class_name, sorted(m.kwargs)] for m in metas] + [plain.storage.read(directory + "/none")]


class Others(JobCase):
    def test_hugging_face(self) -> None:
        self.assertEqual([[True, True]] * 2, self.start(hf_saves, self.dir, 5, "storage", ranks=2), self.log)
        self.assertEqual(["checkpoint-4", "checkpoint-5"], self.visible())
        self.assertEqual(["once.pt", "pytorch_model.bin", "rng_state_0.pth", "rng_state_1.pth"],
                         sorted(os.listdir(os.path.join(self.dir, "checkpoint-4"))))
        self.assertEqual(["pytorch_model.bin", "rng_state_0.pth", "rng_state_1.pth"],
                         sorted(os.listdir(os.path.join(self.dir, "checkpoint-5"))))
        self.start(hf_saves, self.dir, 9, "memory", ranks=2)
        own = [{"rng_state_%d.pth" % rank: {"rank": rank}} for rank in (0, 1)]
        self.assertEqual([dict(own[0], **{"pytorch_model.bin": [9.0] * 3}), own[1]],
                         self.start(hf_loads, self.dir, ranks=2), self.log)

    def test_deepspeed(self) -> None:
        self.assertEqual([[True, ["model_states", "optim_states"]]],
                         self.start(deepspeed_saves, self.dir, 10, "storage"))
        self.assertEqual("10", self.text("latest"))
        loaded, = self.start(deepspeed_loads, self.dir)
        self.assertEqual([10.5, "mp_rank_00_model_states.pt"], [loaded[0]["value"], loaded[0]["of"]])
        self.start(deepspeed_saves, self.dir, 20, "memory")
        loaded, = self.start(deepspeed_loads, self.dir)
        self.assertEqual([20.5, 20.5, {}], [loaded[0]["value"], loaded[1]["value"], loaded[2]], self.log)
        for name in os.listdir(os.path.join(self.runtime, "seg")):
            os.unlink(os.path.join(self.runtime, "seg", name))
        loaded, = self.start(deepspeed_loads, self.dir)
        self.assertEqual([10.5, 10.5, {}], [loaded[0]["value"], loaded[1]["value"], loaded[2]], self.log)

    def test_full_engine(self) -> None:
        (nothing, ranks, said, *rest), = self.start(full, self.dir)
        self.assertEqual([{}, [0], [3, [3.0] * 2, [3.0] * 2, 3]], [nothing, ranks, rest], self.log)
        self.assertIn("one state dict, not 2: a, b", said)
        self.assertEqual(["2"], self.visible())

    def test_local_shards_alone_make_a_sharded_state(self) -> None:
        self.assertEqual([{}, {}], self.start(local_shards, self.dir, ranks=2))
        self.assertEqual(["rank_0.pt", "rank_1.pt"], sorted(os.listdir(os.path.join(self.dir, "3"))))
        self.assertEqual([[0.0, 0.0], [1.0, 1.0]], self.start(local_shards, self.dir, ranks=2))

    def test_storage_of_a_checkpointer(self) -> None:
        module = "dlrover.python.common.storage"
        self.assertEqual([[[module, "PosixDiskStorage", []],
                           [module, "PosixStorageWithDeletion", ["deletion_strategy", "tracker_file"]], ""]],
                         self.start(storages, self.dir))


if __name__ == "__main__":
    unittest.main()
