"""DLRover's engine for DeepSpeed; see the module engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Optional, Tuple

from dlrover.python.common.storage import CheckpointStorage

from .engine import CheckpointEngine

if TYPE_CHECKING:
    from ._types import Path

__all__ = ["DeepSpeedCheckpointEngine"]


class DeepSpeedCheckpointEngine(CheckpointEngine):
    """Saves the files of DeepSpeed; ``latest`` gets the name of their directory. global_shard_num and zero_stage are
    accepted for compatibility: each rank contributes its part."""

    framework = "deepspeed"

    def __init__(self, checkpoint_dir: Path, storage: Optional[CheckpointStorage], global_shard_num: int = 1,
                 zero_stage: int = 0, comm_backend: str = "", save_timeout: float = 600) -> None:
        self.global_shard_num = global_shard_num
        self.zero_stage = zero_stage
        super().__init__(checkpoint_dir, storage, comm_backend, save_timeout)

    def _trackers(self, step: int, files: List[str]) -> List[Tuple[str, str]]:
        return [("latest", files[0].split("/")[0])] if files and "/" in files[0].lstrip("/") else []
