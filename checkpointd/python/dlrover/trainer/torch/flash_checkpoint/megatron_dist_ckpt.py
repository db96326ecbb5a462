"""Flash checkpoints for Megatron-LM with data parallel optimizers; see the module megatron for how it is done.

The functions differ from those of the module megatron in their arguments, and in that load_checkpoint always returns
(iteration, num_floating_point_operations_so_far). The files are Megatron's in both cases.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from dlrover.python.common import storage as _storage
from dlrover.python.common.storage import (CheckpointConstant, CheckpointDeletionStrategy, CheckpointStorage,
                                           PosixDiskStorage, PosixStorageWithDeletion, get_checkpoint_storage)
from dlrover_ckpt.engine import StorageType

from . import megatron
from .megatron_engine import MegatronCheckpointEngine, MegatronDistCheckpointEngine

if TYPE_CHECKING:
    from ._types import Path

    ParameterState = Dict[int, Dict[int, Dict[int, Dict[str, Any]]]]  # bucket, group, place in the group, name

__all__ = ["StorageType", "KeepLatestStepStrategy", "KeepStepIntervalStrategy", "get_checkpoint_storage",
           "save_checkpoint", "load_checkpoint", "wait_latest_checkpoint", "MegatronDistCheckpointer",
           "get_dist_optimizer_checkpoint_name", "get_parameter_state", "get_chained_optimizer_parameter_state",
           "load_parameter_state_from_state_dict", "load_chained_optimizer_parameter_state", "CheckpointConstant",
           "CheckpointDeletionStrategy", "PosixDiskStorage", "PosixStorageWithDeletion", "MegatronCheckpointEngine",
           "MegatronDistCheckpointEngine"]

wait_latest_checkpoint = megatron.wait_latest_checkpoint


class KeepStepIntervalStrategy(_storage.KeepStepIntervalStrategy):
    """Keeps the newest checkpoint and those whose iteration is a multiple of keep_interval."""

    def _path(self, step: int) -> str:
        return os.path.join(self._checkpoint_dir, "iter_%07d" % step)


class KeepLatestStepStrategy(_storage.KeepLatestStepStrategy):
    """Keeps the newest max_to_keep checkpoints, at least one."""

    def _path(self, step: int) -> str:
        return os.path.join(self._checkpoint_dir, "iter_%07d" % step)


def save_checkpoint(iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any,
                    num_floating_point_operations_so_far: float = 0, storage_type: StorageType = StorageType.DISK,
                    comm_backend: str = "", deletion_strategy: Optional[CheckpointDeletionStrategy] = None,
                    save_timeout: float = 600, replica_count: int = 0, storage: Optional[CheckpointStorage] = None,
                    drop_superseded: bool = False, **megatron_args: Any) -> bool:
    """Saves a checkpoint to memory, or to memory and then to disk in the background; all ranks call it.

    deletion_strategy is a CheckpointDeletionStrategy; the one of storage is used when it is None. The rest is as
    in the module megatron.
    """
    return megatron.save(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far,
                         storage_type, megatron_args,
                         deletion_strategy=deletion_strategy or _storage.deletion_strategy_of(storage),
                         save_timeout=save_timeout, replica_count=replica_count, drop_superseded=drop_superseded)


def load_checkpoint(model: Any, optimizer: Any, opt_param_scheduler: Any, load_arg: str = "load", strict: bool = True,
                    comm_backend: str = "", deletion_strategy: Optional[CheckpointDeletionStrategy] = None,
                    save_timeout: float = 600, replica_count: int = 0, storage: Optional[CheckpointStorage] = None,
                    **megatron_args: Any) -> Tuple[int, float]:
    """Loads the newest checkpoint, from memory if it is there; all ranks call it.

    Returns (iteration, num_floating_point_operations_so_far), with 0 for a value that this Megatron does not count.
    """
    result = megatron.load(model, optimizer, opt_param_scheduler, load_arg, strict, megatron_args,
                           deletion_strategy=deletion_strategy or _storage.deletion_strategy_of(storage),
                           save_timeout=save_timeout, replica_count=replica_count)
    return result if isinstance(result, tuple) else (result, 0)


class MegatronDistCheckpointer(megatron.Singleton):
    """The engine of a program that makes Megatron's state dicts by itself.

    use_distributed_optimizer says whether each rank has a part of the optimizer; the other arguments are those of
    save_checkpoint, which does not use this class.
    """

    def __init__(self, checkpoint_dir: Path, storage: Optional[CheckpointStorage] = None, comm_backend: str = "",
                 use_distributed_optimizer: bool = False, save_timeout: float = 600) -> None:
        self.storage = storage or PosixDiskStorage()
        engine = MegatronDistCheckpointEngine if use_distributed_optimizer else MegatronCheckpointEngine
        self.engine = engine(checkpoint_dir, self.storage, comm_backend, save_timeout)


def get_dist_optimizer_checkpoint_name(checkpoints_path: Path, iteration: int, release: bool = False) -> str:
    """Where this rank's part of a distributed optimizer is saved, in the layout of DLRover."""
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    directory = "release" if release else "iter_%07d" % iteration
    return os.path.join(checkpoints_path, directory, "rank_%05d" % rank, "distrib_optim.pt")


def get_parameter_state(dist_optimizer: Any) -> ParameterState:
    """This rank's part of a distributed optimizer: {bucket: {group: {place in the group: {name: tensor}}}}.

    The names are "param" and those of the optimizer's state. The tensors are the optimizer's own, not copies.
    """
    state: ParameterState = {}
    for bucket, group, place, tensors in _own_part(dist_optimizer):
        state.setdefault(bucket, {}).setdefault(group, {})[place] = tensors
    return state


def get_chained_optimizer_parameter_state(chained_optimizer: Any) -> List[Optional[ParameterState]]:
    """get_parameter_state of each optimizer in a chain; None for one that is not distributed."""
    return [get_parameter_state(optimizer) if _distributed(optimizer) else None
            for optimizer in chained_optimizer.chained_optimizers]


def load_parameter_state_from_state_dict(dist_optimizer: Any, state_dict: ParameterState) -> None:
    """Copies the result of get_parameter_state into the optimizer. KeyError: the state is that of another one."""
    for bucket, group, place, tensors in _own_part(dist_optimizer):
        try:
            saved = state_dict[bucket][group][place]
            missing = sorted(set(tensors) - set(saved))
        except KeyError:
            missing = ["any state"]
        if missing:
            raise KeyError("no %s for parameter %d of group %d in bucket %d: it was saved with other parameters, or "
                           "another world size" % (", ".join(missing), place, group, bucket))
        for name, tensor in tensors.items():
            tensor.data.copy_(saved[name])


def load_chained_optimizer_parameter_state(chained_optimizer: Any,
                                           states: Optional[Sequence[Optional[ParameterState]]]) -> None:
    """Copies the result of get_chained_optimizer_parameter_state into the optimizers of a chain. ValueError, KeyError:
    it is that of another chain."""
    optimizers = chained_optimizer.chained_optimizers
    if len(states or ()) != len(optimizers):
        raise ValueError("there are states of %d optimizers for a chain of %d" % (len(states or ()), len(optimizers)))
    for optimizer, state in zip(optimizers, states or ()):
        if _distributed(optimizer):
            load_parameter_state_from_state_dict(optimizer, state or {})


def _distributed(optimizer: Any) -> bool:
    return hasattr(optimizer, "gbuf_ranges")


def _own_part(dist_optimizer: Any) -> Iterator[Tuple[int, int, int, Dict[str, Any]]]:
    """(bucket, group, place in the group, tensors by name) of each parameter of which this rank has a part."""
    inner = dist_optimizer.optimizer
    buckets: List[Tuple[int, Any]] = [
        (number, bucket) for by_type in dist_optimizer.gbuf_ranges for of_type in by_type.values()
        for number, bucket in enumerate(of_type)]
    for number, bucket in buckets:
        for parameter in bucket["param_map"]:
            group, place = dist_optimizer.model_param_group_index_map[parameter]
            main = inner.param_groups[group]["params"][place]
            yield number, group, place, dict(inner.state[main], param=main)
