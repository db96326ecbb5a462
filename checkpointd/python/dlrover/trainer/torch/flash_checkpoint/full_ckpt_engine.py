"""DLRover's engine for states that every rank has in full; see the module engine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Tuple

from dlrover.python.common.storage import CheckpointStorage
from dlrover_ckpt.engine import StorageType
from dlrover_ckpt.image import torch_load

from .engine import MODEL_STATES, CheckpointEngine

if TYPE_CHECKING:
    from ._types import Loaded, Path, StateDict

__all__ = ["FullCheckpointEngine"]


class FullCheckpointEngine(CheckpointEngine):
    """Saves the one state dict that all ranks have, or a shard of each; the arguments are those of DdpCheckpointer."""

    def __init__(self, checkpoint_dir: Path, storage: Optional[CheckpointStorage], local_shard_num: int = 1,
                 global_shard_num: int = 1, comm_backend: str = "", save_timeout: float = 600,
                 replica_count: int = 0) -> None:
        self._shards: Dict[str, int] = {"local_shard_num": local_shard_num, "global_shard_num": global_shard_num}
        super().__init__(checkpoint_dir, storage, comm_backend, save_timeout, replica_count)

    def _make(self, **settings: Any) -> Any:
        from .ddp import DdpCheckpointer

        return DdpCheckpointer(self.checkpoint_dir, **dict(settings, **self._shards))

    @property
    def latest_step(self) -> int:
        return int(self._checkpointer._engine.latest_step)

    def _save(self, step: int, state_dict: Mapping[str, StateDict], paths: Mapping[str, Path],
              storage_type: StorageType) -> bool:
        if len(state_dict) != 1:
            raise ValueError("FullCheckpointEngine saves one state dict, not %d: %s"
                             % (len(state_dict), ", ".join(sorted(state_dict))))
        (name, state), = state_dict.items()
        return bool(self._checkpointer.save_checkpoint(step, state, paths[name], storage_type))

    def get_state_dict_from_memory(self) -> Tuple[int, Dict[str, Any]]:
        loaded = self._checkpointer._engine.load()
        if loaded is None or loaded.source != "memory":
            return 0, {}
        return loaded.step, {MODEL_STATES: torch_load(view) for view in loaded.files.values()}

    def load(self, resume_path: Path = "") -> Loaded:
        """The newest state dict, or that of the file resume_path; {} when there is none."""
        loaded: Loaded = self._checkpointer.load_checkpoint(resume_path)
        return loaded

    def wait_latest_checkpoint(self, timeout: float = 1800) -> Any:
        return self._checkpointer.wait_latest_checkpoint(timeout)

    def get_saving_ranks(self) -> Optional[List[int]]:
        per_node, each = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), self._shards["local_shard_num"]
        return [rank for rank in range(int(os.environ.get("WORLD_SIZE", "1"))) if rank % per_node < each]

    def get_local_shard_num(self) -> int:
        return self._shards["local_shard_num"]

    def get_global_shard_num(self) -> int:
        return int(self._checkpointer._engine.shards)
