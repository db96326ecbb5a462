"""DLRover's engine for sharded models; see the module engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Mapping, Tuple

from dlrover_ckpt.engine import StorageType

from ._lacking import lacking
from .engine import CheckpointEngine

if TYPE_CHECKING:
    from ._types import Path, StateDict

__all__ = ["FsdpCheckpointEngine"]

__getattr__ = lacking(__name__, {
    "SharedMemoryWriter": "use FsdpShardCheckpointer.save_checkpoint",
    "SharedMemoryReader": "use FsdpShardCheckpointer.get_storage_reader()",
    "FileReader": "use torch.distributed.checkpoint.FileSystemReader",
    "SlicedBufferedReader": "use torch.distributed.checkpoint.FileSystemReader"})


class FsdpCheckpointEngine(CheckpointEngine):
    """Saves sharded state dicts as torch.distributed.checkpoint; paths has one directory."""

    def _make(self, **settings: Any) -> Any:
        from .fsdp import FsdpShardCheckpointer

        return FsdpShardCheckpointer(self.checkpoint_dir, **settings)

    @property
    def latest_step(self) -> int:
        return int(self._checkpointer._engine.latest_step)

    def _save(self, step: int, state_dict: StateDict, paths: Mapping[str, Path], storage_type: StorageType) -> bool:
        return bool(self._checkpointer.save_checkpoint(
            step, state_dict=state_dict, path=next(iter(paths.values()), ""), storage_type=storage_type))

    def get_state_dict_from_memory(self) -> Tuple[int, Dict[str, Any]]:
        """Not for shards, which have no state dict of their own: always raises NotImplementedError. Use load()."""
        raise NotImplementedError("shards have no state dict of their own: use load(), which returns a StorageReader")

    def load(self, resume_path: Path = "") -> Any:
        """The StorageReader for torch.distributed.checkpoint.load; None when there is nothing to load."""
        return self._checkpointer.get_storage_reader(resume_path)

    def wait_latest_checkpoint(self, timeout: float = 1800) -> Any:
        return self._checkpointer.wait_latest_checkpoint(timeout)

    def get_global_shard_num(self) -> int:
        return int(self._checkpointer._engine.shards)
