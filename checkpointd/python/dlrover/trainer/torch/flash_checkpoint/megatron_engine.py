"""DLRover's engines for Megatron-LM; see the module engine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from dlrover.python.common.storage import CheckpointStorage
from dlrover_ckpt.adapter import Checkpointer

from .engine import CheckpointEngine

if TYPE_CHECKING:
    from ._types import Path

__all__ = ["MegatronCheckpointEngine", "MegatronDistCheckpointEngine"]

TRACKER_FILE = "latest_checkpointed_iteration.txt"

_checkpointers: Dict[str, Checkpointer] = {}  # by directory; Megatron's interface has no object that could keep them


def checkpointer_of(directory: Optional[Path], **settings: Any) -> Checkpointer:
    """The checkpointer of a directory, shared by all callers; the settings of the first call count."""
    if not directory:
        raise ValueError("Megatron has no checkpoint directory: pass --save")
    key = os.path.realpath(directory)
    if key not in _checkpointers:
        _checkpointers[key] = Checkpointer(directory, "megatron", **settings)
    return _checkpointers[key]


class MegatronCheckpointEngine(CheckpointEngine):
    """Saves the files of Megatron; its tracker moves when the checkpoint is committed."""

    framework = "megatron"

    def _make(self, **settings: Any) -> Any:
        checkpointer = checkpointer_of(self.checkpoint_dir, **settings)
        checkpointer.adjust(**settings)
        return checkpointer

    def _trackers(self, step: int, files: List[str]) -> List[Tuple[str, str]]:
        return [(TRACKER_FILE, str(step))]

    def load(self, resume_path: Path = "") -> Tuple[int, Dict[str, Any]]:
        """(iteration, {name: state dict}) in memory; (0, {}) when there is none."""
        return self.get_state_dict_from_memory()


class MegatronDistCheckpointEngine(MegatronCheckpointEngine):
    """The same: each rank contributes its part, be it the optimizer of all ranks or a part of it."""

    def __init__(self, checkpoint_dir: Path, storage: Optional[CheckpointStorage], comm_backend: str = "",
                 save_timeout: float = 600) -> None:
        super().__init__(checkpoint_dir, storage, comm_backend, save_timeout)
