"""Flash checkpoints for FSDP: FullyShardedDataParallel and fully_shard models. torch 2.1 or newer is needed.

FsdpShardCheckpointer saves in the format of torch.distributed.checkpoint, each rank its shards; FsdpFullCheckpointer
gathers one full state dict. Both can be loaded without this package.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple, Union, overload

from dlrover.python.common.storage import (CheckpointConstant, CheckpointDeletionStrategy, CheckpointStorage,
                                           get_checkpoint_storage)
from dlrover_ckpt import dcp
from dlrover_ckpt.engine import Engine, checked_dir, checked_step
from dlrover_ckpt.image import torch_load, torch_zip

from .checkpointer import Checkpointer, StorageType
from .fsdp_engine import FsdpCheckpointEngine
from .full_ckpt_engine import FullCheckpointEngine

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader
    from torch.nn import Module
    from torch.optim import Optimizer

    from ._types import Loaded, Path, StateDict

__all__ = ["FsdpShardCheckpointer", "FsdpFullCheckpointer", "StorageType", "FsdpCheckpointEngine",
           "FullCheckpointEngine", "CheckpointConstant", "get_checkpoint_storage"]


class _FsdpCheckpointer(Checkpointer):
    """The common part of both. All ranks make one, and all make the same calls."""

    _optimizer_key = ""
    checkpoint_dir: str  # absolute
    storage: CheckpointStorage  # for small files of the caller's own

    def __init__(self, checkpoint_dir: Path, save_timeout: float,
                 deletion_strategy: Optional[CheckpointDeletionStrategy]) -> None:
        dcp.require_torch()
        self.checkpoint_dir = checked_dir(checkpoint_dir)
        self.storage = get_checkpoint_storage(deletion_strategy)
        self._group = dcp.host_group(save_timeout)
        self._engine: Engine

    @overload  # type: ignore[override]  # more than the state dict of other checkpointers
    def save_checkpoint(self, step: int, model: Optional[Module] = ..., optimizer: Optional[Optimizer] = ...,
                        extra_sd: Optional[StateDict] = ..., path: Path = ..., storage_type: StorageType = ...,
                        state_dict: Optional[StateDict] = ...) -> bool: ...

    @overload
    def save_checkpoint(self, step: int, model: StateDict, optimizer: Path = ..., extra_sd: StorageType = ...,
                        *, path: Path = ..., storage_type: StorageType = ...) -> bool: ...

    def save_checkpoint(self, step: int, model: Any = None, optimizer: Any = None, extra_sd: Any = None,
                        path: Path = "", storage_type: StorageType = StorageType.DISK,
                        state_dict: Optional[StateDict] = None) -> bool:
        """Saves a model and its optimizer, or a state dict that the caller made. All ranks call it.

        save_checkpoint(step, model, optimizer, extra_sd, path, storage_type): extra_sd holds further entries.
        save_checkpoint(step, state_dict, path, storage_type): the state dict as it is.

        step is from 0 to 2**63 - 1; it may go back. path is where the checkpoint will be. When it returns, the tensors
        may change, and the save survives the process; with StorageType.DISK it is on its way to the disk as well, and
        wait_latest_checkpoint() returns when it is there.

        False: it was skipped, the log says why. ValueError, TypeError: the storage type or the step is none. Without a
        daemon, or without room in shared memory, a DISK save is written before this returns: then it is durable, or
        there is RuntimeError or OSError with the reason.
        """
        step = checked_step(step)
        if isinstance(model, Mapping):
            model, state_dict = None, model
        if state_dict is not None:
            path = optimizer if isinstance(optimizer, (str, os.PathLike)) else path
            storage_type = extra_sd if isinstance(extra_sd, StorageType) else storage_type
        if not isinstance(storage_type, StorageType):
            raise ValueError("storage_type is %r, it must be StorageType.MEMORY or StorageType.DISK" % (storage_type,))
        if state_dict is None:
            state_dict = {"model": _model_state(model)}
            if optimizer is not None and optimizer.state:  # asking for a state that is not there would make one
                state_dict[self._optimizer_key] = _optimizer_state(model, optimizer)
            state_dict.update(extra_sd or {})
        return self._save(step, state_dict, os.fspath(path or ""), storage_type)

    def wait_latest_checkpoint(self, timeout: float = 1800) -> None:
        """Waits until the newest DISK save is durable: all shards are fsynced in place, and the tracker names it.

        timeout: seconds. TimeoutError: it is not by then. RuntimeError: it never will be, and why.
        """
        self._engine.wait(timeout=timeout)

    @abstractmethod
    def _save(self, step: int, state_dict: Any, path: str, storage_type: StorageType) -> bool:
        """Saves a collected state dict; an empty path is the default one."""

    def _relative(self, path: str) -> str:
        """Files below the checkpoint directory are named by their place in it, so that it can be moved."""
        full = os.path.abspath(os.path.expanduser(path))
        inside = os.path.relpath(full, self._engine.dir)
        return full if inside == ".." or inside.startswith("../") else inside


class FsdpShardCheckpointer(_FsdpCheckpointer):
    """Checkpoints to which every rank contributes its shards, as torch.distributed.checkpoint.

    checkpoint_dir     where checkpoints are, the same for all ranks; one goes to <checkpoint_dir>/<step> by default
    comm_backend       accepted for compatibility: ranks agree through a gloo group
    deletion_strategy  which old checkpoints are deleted, from dlrover.python.common.storage
    save_timeout       seconds after which a save that not all ranks have finished is aborted
    replica_count      on how many nodes a checkpoint in memory is kept; 0 and 1: on its own only
    drop_superseded    whether a DISK save may take the place of an older one that waits for the disk, when there is no
                       room for both; else training waits

    A world of another size loads from disk. The state dict has the entries "model", "optim" and those of extra_sd.
    All ranks make one after init_process_group. RuntimeError: torch is older than 2.1. ValueError: checkpoint_dir is
    empty. OSError: it cannot be made.
    """

    _optimizer_key = "optim"

    def __init__(self, checkpoint_dir: Path, comm_backend: str = "",
                 deletion_strategy: Optional[CheckpointDeletionStrategy] = None, save_timeout: float = 600,
                 replica_count: int = 0, drop_superseded: bool = False) -> None:
        super().__init__(checkpoint_dir, save_timeout, deletion_strategy)
        rank, world = _rank_and_world()
        self._saver = dcp.Saver(self._group)
        self._engine = Engine(checkpoint_dir, "fsdp", shard=rank, shards=world, primary=True,
                              deletion_strategy=deletion_strategy, save_timeout=save_timeout,
                              replica_count=replica_count, group=self._group,
                              drop_superseded=drop_superseded)

    def _save(self, step: int, state_dict: Any, path: str, storage_type: StorageType) -> bool:
        directory = self._relative(path or os.path.join(self._engine.dir, str(step)))
        return self._engine.save(step, lambda: self._saver.images(state_dict, directory), storage_type)

    def get_storage_reader(self, resume_path: Optional[Path] = "") -> Optional[StorageReader]:
        """The StorageReader for torch.distributed.checkpoint.load; None when there is nothing to load.

        It reads the newest checkpoint, from memory if it is there; or that in the directory resume_path. All ranks call
        it. The save in memory does not change for as long as the reader lives.
        """
        if resume_path:
            from torch.distributed.checkpoint.filesystem import FileSystemReader

            return FileSystemReader(os.path.expanduser(os.fspath(resume_path)))
        loaded = self._engine.load()
        return None if loaded is None else dcp.reader(loaded, self._group)

    def load_checkpoint(self, model: Module, optimizer: Optional[Optimizer] = None,  # type: ignore[override]
                        resume_path: Optional[Path] = "") -> Loaded:
        """Loads the newest checkpoint, or that in the directory resume_path, into model and optimizer.

        Returns the entries that extra_sd had; {} as well when there is no checkpoint. All ranks call it. A save that is
        damaged on any rank is skipped for an older one. Torch's exceptions for a state of other names or shapes are
        passed on.
        """
        reader = self.get_storage_reader(resume_path)
        if reader is None:
            return {}
        metadata = reader.read_metadata()
        has_optimizer = any(path[0] == "optim" for path in _paths(metadata).values())
        state = dict(_extras(metadata, ("model", "optim")), model=_model_state(model))
        if optimizer is not None and has_optimizer:
            if _states() is None and not optimizer.state:
                _make_state(optimizer)
            state["optim"] = _optimizer_state(model, optimizer)
        dcp.load(state, reader)
        if "optim" in state:  # before the model: some versions of torch make a step to prepare the optimizer for it
            _set_optimizer_state(model, optimizer, state.pop("optim"))
        _set_model_state(model, state.pop("model"))
        return state


class FsdpFullCheckpointer(_FsdpCheckpointer):
    """Checkpoints of the full state in one file. Local rank 0 of every node keeps it in memory, rank 0 writes it.

    The arguments are those of FsdpShardCheckpointer. The default path is <checkpoint_dir>/<step>/rank_0.pt; the entries
    are "model", "optimizer" and those of extra_sd. A world of any size can load it. Saving gathers every tensor.
    """

    _optimizer_key = "optimizer"

    def __init__(self, checkpoint_dir: Path, comm_backend: str = "",
                 deletion_strategy: Optional[CheckpointDeletionStrategy] = None, save_timeout: float = 600,
                 replica_count: int = 0, drop_superseded: bool = False) -> None:
        super().__init__(checkpoint_dir, save_timeout, deletion_strategy)
        self._rank = _rank_and_world()[0]
        self._holder = self._rank == 0 or int(os.environ.get("LOCAL_RANK", self._rank)) == 0
        self._cache: Dict[str, Any] = {}
        self._engine = Engine(checkpoint_dir, "fsdp_full", shard=0, shards=1, primary=self._rank == 0,
                              holder=self._holder, resize="any", deletion_strategy=deletion_strategy,
                              save_timeout=save_timeout, replica_count=replica_count, group=self._group,
                              drop_superseded=drop_superseded)

    def _save(self, step: int, state_dict: Any, path: str, storage_type: StorageType) -> bool:
        target = self._relative(path or os.path.join(self._engine.dir, str(step), "rank_0.pt"))
        full = _gathered(state_dict, self._group, self._holder)
        return self._engine.save(step, lambda: [torch_zip(target, full, self._cache)], storage_type)

    def load_checkpoint(self, model: Module, optimizer: Optional[Optimizer] = None,  # type: ignore[override]
                        resume_path: Optional[Path] = "") -> Loaded:
        """Loads the newest checkpoint, or that in the file resume_path, into model and optimizer.

        Returns the entries that extra_sd had; {} as well when there is no checkpoint. All ranks call it; rank 0 alone
        reads, where this torch can broadcast.
        """
        import torch

        read = self._find(os.path.expanduser(os.fspath(resume_path or "")))
        if read is None:
            return {}
        from_rank0 = _can_broadcast() and self._group is not None
        state = read() if self._rank == 0 or not from_rank0 else {}
        own = {k: v for k, v in state.items() if k not in ("model", "optimizer")}
        box: List[Tuple[Loaded, bool]] = [(own, "optimizer" in state)]
        if from_rank0:
            torch.distributed.broadcast_object_list(box, src=0, group=self._group)
        extra, has_optimizer = box[0]
        if optimizer is not None and has_optimizer:  # before the model: see FsdpShardCheckpointer
            _set_optimizer_state(model, optimizer, state.get("optimizer", {}), full=True)
        _set_model_state(model, state.get("model", {}), full=True)
        return extra

    def _find(self, resume_path: str) -> Optional[Callable[[], Dict[str, Any]]]:
        """How the checkpoint is read; None when there is none."""
        import torch

        path = resume_path
        if not path:
            loaded = self._engine.load()
            if loaded is None:
                return None
            if loaded.source == "memory":
                view = next(iter(loaded.files.values()))
                return lambda: torch_load(view)
            path = os.path.join(loaded.dir, loaded.manifest["files"][0]["path"])
        return lambda: torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def _rank_and_world() -> Tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


# The state of models and optimizers, by torch.distributed.checkpoint.state_dict. Versions of torch that do not have it
# know only FullyShardedDataParallel, which has functions of its own.


def _states() -> Any:
    """torch.distributed.checkpoint.state_dict, or None where it is missing."""
    try:
        from torch.distributed.checkpoint import state_dict
    except ImportError:
        return None
    return state_dict if hasattr(state_dict, "set_optimizer_state_dict") else None


def _can_broadcast() -> bool:
    states = _states()
    return states is not None and "broadcast_from_rank0" in states.StateDictOptions.__dataclass_fields__


def _options(full: bool) -> Any:
    options: Dict[str, bool] = {"full_state_dict": True} if full else {}
    if full and _can_broadcast() and _rank_and_world()[1] > 1:
        options["broadcast_from_rank0"] = True
    return _states().StateDictOptions(**options)


def _old_fsdp(model: Any, full: bool = False) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    kind = StateDictType.FULL_STATE_DICT if full else StateDictType.SHARDED_STATE_DICT
    return FullyShardedDataParallel, FullyShardedDataParallel.state_dict_type(model, kind)


def _model_state(model: Any) -> Any:
    if _states() is not None:
        return _states().get_model_state_dict(model)
    _, sharded = _old_fsdp(model)
    with sharded:
        return model.state_dict()


def _optimizer_state(model: Any, optimizer: Any) -> Any:
    if _states() is not None:
        return _states().get_optimizer_state_dict(model, optimizer)
    fsdp, sharded = _old_fsdp(model)
    with sharded:
        return fsdp.optim_state_dict(model, optimizer)


def _make_state(optimizer: Any) -> None:
    """Gives a fresh optimizer a state that can be loaded into. The parameters may change."""
    import torch

    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _set_model_state(model: Any, state: Dict[str, Any], full: bool = False) -> None:
    if _states() is not None:
        _states().set_model_state_dict(model, state, options=_options(full))
        return
    _, kind = _old_fsdp(model, full)
    with kind:
        model.load_state_dict(state)


def _set_optimizer_state(model: Any, optimizer: Any, state: Dict[str, Any], full: bool = False) -> None:
    if _states() is not None:
        _states().set_optimizer_state_dict(model, optimizer, optim_state_dict=state, options=_options(full))
        return
    fsdp, kind = _old_fsdp(model, full)
    with kind:
        optimizer.load_state_dict(fsdp.optim_state_dict_to_load(model, optimizer, state))


# Nested entries of a checkpoint.


def _paths(metadata: Any) -> Dict[str, Tuple[Any, ...]]:
    """{name in the checkpoint: the keys that lead to it}."""
    known = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    return {name: tuple(known.get(name, (name,))) for name in metadata.state_dict_metadata}


def _extras(metadata: Any, but: Tuple[str, ...]) -> Dict[str, Any]:
    """A state dict to load into, of all entries of a checkpoint but some."""
    import torch

    state: Dict[str, Any] = {}
    for name, path in _paths(metadata).items():
        form = metadata.state_dict_metadata[name]
        if path[0] not in but:
            _put(state, path, torch.empty(form.size, dtype=form.properties.dtype) if hasattr(form, "size") else None)
    return state


def _put(container: Any, path: Tuple[Any, ...], value: Any) -> None:
    for key, following in zip(path, path[1:]):
        container = _at(container, key, [] if isinstance(following, int) else {})
    if isinstance(container, list):
        _at(container, path[-1], None)
    container[path[-1]] = value


def _at(container: Any, key: Any, default: Any) -> Any:
    if isinstance(container, dict):
        return container.setdefault(key, default)
    container.extend([None] * (key + 1 - len(container)))
    if container[key] is None:
        container[key] = default
    return container[key]


def _gathered(value: Any, group: Any, keep: bool) -> Any:
    """The same with full tensors on the CPU, on the ranks that keep it. All ranks call it."""
    import torch

    if isinstance(value, Mapping):
        return {k: _gathered(v, group, keep) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_gathered(v, group, keep) for v in value)
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    elif hasattr(value, "placements"):  # torch 2.1
        from torch.distributed._tensor.placement_types import Replicate

        whole = value.redistribute(placements=[Replicate()] * len(value.placements))
        value = whole.to_local().clone()  # until then it may be one that a collective is still filling
    elif hasattr(value, "local_shards"):
        value = _whole(value, group)
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().cpu() if keep else None


def _whole(sharded: Any, group: Any) -> Any:
    """The full tensor of a ShardedTensor of which each rank has at most one shard."""
    import torch
    import torch.distributed as dist

    shards = sharded.metadata().shards_metadata
    whole = torch.empty(sharded.size(), dtype=sharded.dtype)
    sizes = [torch.Size(s.shard_sizes).numel() * whole.element_size() for s in shards]
    mine = torch.zeros(max(sizes), dtype=torch.uint8)
    for shard in sharded.local_shards():
        data = shard.tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        mine[:data.numel()] = data
    parts: List[Any] = [mine]
    if group is not None:
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
    for shard, size in zip(shards, sizes):
        target = whole
        for dim, (offset, length) in enumerate(zip(shard.shard_offsets, shard.shard_sizes)):
            target = target.narrow(dim, offset, length)
        target.copy_(parts[shard.placement.rank()][:size].view(whole.dtype).view(*shard.shard_sizes))
    return whole
