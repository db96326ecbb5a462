"""The common part of all checkpointers."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from typing import TYPE_CHECKING, Any, Optional

from dlrover_ckpt.engine import StorageType

if TYPE_CHECKING:
    from ._types import Path

__all__ = ["Checkpointer", "StorageType"]


class Checkpointer(metaclass=ABCMeta):
    """Saves the state of a training job into shared memory or to disk, and loads the newest of both."""

    @abstractmethod
    def save_checkpoint(self, step: int, state_dict: Any, path: Path = "",
                        storage_type: StorageType = StorageType.DISK) -> Any:
        """Saves a state dict.

        step          the iteration; a later load returns the last save, even with a lower step
        path          where the file will be; default: a place under the checkpoint directory
        storage_type  MEMORY: survives the process. DISK: written to disk as well, in the background
        """

    @abstractmethod
    def load_checkpoint(self, resuming_path: Optional[Path] = None) -> Any:
        """Returns the newest state dict, from memory if it is there, else from disk; {} when there is none.

        resuming_path  the checkpoint to load; default: the newest. The checkpointers call it resume_path.
        """
