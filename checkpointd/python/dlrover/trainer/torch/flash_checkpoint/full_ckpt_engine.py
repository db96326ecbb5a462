"""DLRover's engine for states that every rank has in full; see the module engine."""

from __future__ import annotations

import os
from typing import Any

from dlrover_ckpt.engine import StorageType
from dlrover_ckpt.image import torch_load

from .engine import MODEL_STATES, CheckpointEngine

__all__ = ["FullCheckpointEngine"]


class FullCheckpointEngine(CheckpointEngine):
    """Saves the one state dict that all ranks have, or a shard of each; the arguments are those of DdpCheckpointer."""

    def __init__(self, checkpoint_dir, storage, local_shard_num=1, global_shard_num=1, comm_backend="",
                 save_timeout=600, replica_count=0) -> None:
        self._shards = {"local_shard_num": local_shard_num, "global_shard_num": global_shard_num}
        super().__init__(checkpoint_dir, storage, comm_backend, save_timeout, replica_count)

    def _make(self, **settings: Any) -> Any:
        from .ddp import DdpCheckpointer

        return DdpCheckpointer(self.checkpoint_dir, **self._shards, **settings)

    @property
    def latest_step(self) -> int:
        return self._checkpointer._engine.latest_step

    def _save(self, step, state_dict, paths, storage_type: StorageType) -> bool:
        if len(state_dict) != 1:
            raise ValueError("FullCheckpointEngine saves one state dict, not %d: %s"
                             % (len(state_dict), ", ".join(sorted(state_dict))))
        (name, state), = state_dict.items()
        return self._checkpointer.save_checkpoint(step, state, paths[name], storage_type)

    def get_state_dict_from_memory(self):
        loaded = self._checkpointer._engine.load()
        if loaded is None or loaded.source != "memory":
            return 0, {}
        return loaded.step, {MODEL_STATES: torch_load(view) for view in loaded.files.values()}

    def load(self, resume_path=""):
        """The newest state dict, or that of the file resume_path; {} when there is none."""
        return self._checkpointer.load_checkpoint(resume_path)

    def wait_latest_checkpoint(self, timeout=1800):
        return self._checkpointer.wait_latest_checkpoint(timeout)

    def get_saving_ranks(self):
        per_node, each = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), self._shards["local_shard_num"]
        return [rank for rank in range(int(os.environ.get("WORLD_SIZE", "1"))) if rank % per_node < each]

    def get_local_shard_num(self):
        return self._shards["local_shard_num"]

    def get_global_shard_num(self):
        return self._checkpointer._engine.shards
