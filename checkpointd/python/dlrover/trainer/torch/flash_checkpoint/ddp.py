"""Checkpoints of models whose every rank has the full state: DistributedDataParallel, or a single process."""

from __future__ import annotations

import os
from typing import Any, Dict

from dlrover.python.common.storage import CheckpointConstant, get_checkpoint_storage
from dlrover_ckpt.engine import Engine, checked_dir
from dlrover_ckpt.image import torch_load, torch_zip

from .checkpointer import Checkpointer, StorageType
from .full_ckpt_engine import FullCheckpointEngine

__all__ = ["DdpCheckpointer", "StorageType", "FullCheckpointEngine", "CheckpointConstant", "get_checkpoint_storage"]


class DdpCheckpointer(Checkpointer):
    """Checkpoints of a model whose every rank has the full state.

    checkpoint_dir     where checkpoints are, the same for all ranks
    local_shard_num    how many ranks of a node keep a shard of the state; 1 = the state is not sharded
    global_shard_num   how many shards the state has in all; 1 = it is not sharded
    comm_backend       accepted for compatibility: the default process group is used
    deletion_strategy  which old checkpoints are deleted, from dlrover.python.common.storage
    save_timeout       seconds after which a save that was not finished is given up
    replica_count      on how many nodes a copy of a shard is kept in memory, 0 = no further node
    drop_superseded    whether a DISK save may take the place of an older one that waits for the disk, when there is no
                       room for both; else training waits

    With one shard, local rank 0 of every node keeps the state in memory, and rank 0 writes it to disk.
    """

    def __init__(self, checkpoint_dir, local_shard_num=1, global_shard_num=1, comm_backend="", deletion_strategy=None,
                 save_timeout=600, replica_count=0, drop_superseded=False):
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
                              save_timeout=save_timeout, replica_count=replica_count, drop_superseded=drop_superseded)
        self._cache: Dict[str, Any] = {}

    def save_checkpoint(self, step, state_dict, path="", storage_type=StorageType.DISK):
        """Saves a state dict; to be called by all ranks.

        The default path is <checkpoint_dir>/<step>/rank_<r>.pt, r being the rank that writes it.
        False: it was skipped, the log says why. ValueError: the storage type is none.
        """
        target = self._inside(os.fspath(path)) if path else os.path.join(str(step), "rank_%d.pt" % self._engine.shard)
        return self._engine.save(step, lambda: [torch_zip(target, state_dict, self._cache)], storage_type)

    def load_checkpoint(self, resume_path=""):
        """Returns the newest state dict, or that of the file resume_path, on the CPU; {} when there is none."""
        if resume_path:
            return _load_file(os.path.expanduser(os.fspath(resume_path)))
        loaded = self._engine.load()
        if loaded is None:
            return {}
        for view in loaded.files.values():
            return torch_load(view)
        files = [f["path"] for f in loaded.manifest["files"] if f.get("shard") in (None, self._engine.shard)]
        wanted = "rank_%d.pt" % self._engine.shard
        files.sort(key=lambda p: os.path.basename(p) != wanted)
        return _load_file(os.path.join(loaded.dir, files[0])) if files else {}

    def wait_latest_checkpoint(self, timeout=1800):
        """Waits until the newest DISK save is on disk. TimeoutError; RuntimeError: it never will be, and why."""
        self._engine.wait(timeout=timeout)

    def _inside(self, path: str) -> str:
        """A file below the checkpoint directory is named by its place in it, so that the directory can be moved."""
        full = os.path.abspath(os.path.expanduser(path))
        inside = os.path.relpath(full, self._engine.dir)
        return full if inside.startswith("..") else inside


def _load_file(path: str) -> Any:
    import torch

    options = {"map_location": "cpu"}
    if tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 1):
        options["mmap"] = True
    try:
        return torch.load(path, **options, weights_only=False)
    except (TypeError, RuntimeError):  # an old torch, or a file in the old format, which cannot be mapped
        return torch.load(path, map_location="cpu")
