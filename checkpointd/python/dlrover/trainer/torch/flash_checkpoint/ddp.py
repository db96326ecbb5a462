"""Checkpoints of models whose every rank has the full state: DistributedDataParallel, or a single process."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Dict, List, Optional

from dlrover.python.common.storage import (CheckpointConstant, CheckpointDeletionStrategy, CheckpointStorage,
                                           get_checkpoint_storage)
from dlrover_ckpt.engine import Engine, checked_dir
from dlrover_ckpt.image import torch_load, torch_zip
from dlrover_ckpt.restore import Unloadable

from .checkpointer import Checkpointer, StorageType
from .full_ckpt_engine import FullCheckpointEngine

if TYPE_CHECKING:
    from ._types import Loaded, Path, StateDict

__all__ = ["DdpCheckpointer", "StorageType", "FullCheckpointEngine", "CheckpointConstant", "get_checkpoint_storage"]


class DdpCheckpointer(Checkpointer):
    """Checkpoints of a model whose every rank has the full state.

    checkpoint_dir     where checkpoints are, the same for all ranks; it is made if need be
    local_shard_num    how many ranks of a node keep a shard of the state; 1 = the state is not sharded
    global_shard_num   how many shards the state has in all; 1 = it is not sharded
    comm_backend       accepted for compatibility: the default process group is used
    deletion_strategy  which old checkpoints are deleted, from dlrover.python.common.storage
    save_timeout       seconds after which a save that was not finished is aborted
    replica_count      on how many nodes a copy of a shard is kept in memory, 0 = no further node
    drop_superseded    whether a DISK save may take the place of an older one that waits for the disk, when there is no
                       room for both; else training waits

    With one shard, local rank 0 of every node keeps the state in memory, and rank 0 writes it to disk.
    Every rank makes one, and all make the same calls with the same steps. ValueError: checkpoint_dir is empty. OSError:
    it cannot be made.
    """

    checkpoint_dir: str  # absolute
    storage: CheckpointStorage  # for small files of the caller's own

    def __init__(self, checkpoint_dir: Path, local_shard_num: int = 1, global_shard_num: int = 1,
                 comm_backend: str = "", deletion_strategy: Optional[CheckpointDeletionStrategy] = None,
                 save_timeout: float = 600, replica_count: int = 0, drop_superseded: bool = False) -> None:
        self.checkpoint_dir = checked_dir(checkpoint_dir)
        self.storage = get_checkpoint_storage(deletion_strategy)
        global_shard_num = max(global_shard_num, local_shard_num)
        rank = int(os.environ.get("RANK", "0"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        sharded = global_shard_num > 1
        shard = rank % global_shard_num
        self._engine = Engine(checkpoint_dir, "ddp", shard=shard, shards=global_shard_num,
                              primary=rank < global_shard_num, holder=sharded or local_rank < local_shard_num,
                              resize="same" if sharded else "any", deletion_strategy=deletion_strategy,
                              save_timeout=save_timeout, replica_count=replica_count, drop_superseded=drop_superseded,
                              reshards=False)
        self._cache: Dict[str, Any] = {}

    def save_checkpoint(self, step: int, state_dict: StateDict, path: Path = "",
                        storage_type: StorageType = StorageType.DISK) -> bool:
        """Saves a state dict; to be called by all ranks.

        step          from 0 to 2**63 - 1; it may go back
        state_dict    any object for torch.save; tensors may be on any device
        path          the file; default: <checkpoint_dir>/<step>/rank_<r>.pt, r being the rank that writes it
        storage_type  MEMORY: when this returns, the save is in shared memory and survives the process. DISK: that, and
                      it is on its way to the disk; wait_latest_checkpoint() returns when it is there

        When it returns, the tensors may change. False: it was skipped, the log says why. ValueError, TypeError: the
        storage type or the step is none. Without a daemon, or without room in shared memory, a DISK save is written
        before this returns: then it is durable, or there is RuntimeError or OSError with the reason.
        """
        target = self._inside(os.fspath(path)) if path else os.path.join(str(step), "rank_%d.pt" % self._engine.shard)
        return self._engine.save(step, lambda: [torch_zip(target, state_dict, self._cache)], storage_type)

    def load_checkpoint(self, resume_path: Optional[Path] = "") -> Loaded:
        """Returns the newest state dict, or that of the file resume_path, on the CPU; {} when there is none.

        To be called by all ranks, after init_process_group: they load the same save. The tensors are views of private
        memory, and may be changed. Instead of a damaged save an older one is loaded, with a log line. RuntimeError:
        there are checkpoints, but of another number of shards, or not all nodes see them. With
        resume_path the errors are those of open and torch.load.
        """
        if resume_path:
            return _load_file(os.path.expanduser(os.fspath(resume_path)))
        loaded = self._engine.load()
        if loaded is None:
            return {}
        for view in loaded.files.values():
            state: Loaded = torch_load(view)
            return state
        files = [f["path"] for f in loaded.manifest["files"] if f.get("shard") in (None, self._engine.shard)]
        if "shards" not in loaded.manifest:
            _check_parts(loaded, files, self._engine.shards)
        wanted = "rank_%d.pt" % self._engine.shard
        files.sort(key=lambda p: os.path.basename(p) != wanted)
        return _load_file(os.path.join(loaded.dir, files[0])) if files else {}

    def wait_latest_checkpoint(self, timeout: float = 1800) -> None:
        """Waits until the newest DISK save is durable: fsynced under its final name, and named by the tracker.

        timeout: seconds. TimeoutError: it is not by then. RuntimeError: it never will be, and why.
        """
        self._engine.wait(timeout=timeout)

    def _inside(self, path: str) -> str:
        """A file below the checkpoint directory is named by its place in it, so that the directory can be moved."""
        full = os.path.abspath(os.path.expanduser(path))
        inside = os.path.relpath(full, self._engine.dir)
        return full if inside.startswith("..") else inside


def _check_parts(loaded: Any, files: List[str], shards: int) -> None:
    """Whether a checkpoint of another program has as many parts as are loaded; only their names show it."""
    parts = {m.group(1) for m in (re.match(r"rank_(\d+)\.pt$", os.path.basename(f)) for f in files) if m}
    if (parts or shards > 1) and parts != {str(i) for i in range(shards)}:
        raise Unloadable("step %d in %s has %d files rank_<r>.pt, and this job has %d shards: load it with as many shards "
                         "as it has, or use another directory to begin anew"
                         % (loaded.step, loaded.dir, len(parts), shards))


def _load_file(path: str) -> Loaded:
    import torch

    options: Dict[str, Any] = {"map_location": "cpu"}
    if tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 1):
        options["mmap"] = True
    state: Loaded
    try:
        state = torch.load(path, **options, weights_only=False)
    except (TypeError, RuntimeError):  # an old torch, or a file in the old format, which cannot be mapped
        state = torch.load(path, map_location="cpu")
    return state
