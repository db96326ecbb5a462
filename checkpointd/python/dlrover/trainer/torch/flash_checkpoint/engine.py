"""DLRover's checkpoint engines, for programs that call them: named state dicts, each with the path of its file.

The checkpointers do not need them. All ranks make an engine, and all make the same calls.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Tuple

from dlrover.python.common.storage import CheckpointStorage, deletion_strategy_of
from dlrover_ckpt.adapter import Capture, Checkpointer, Found, Want
from dlrover_ckpt.engine import StorageType
from dlrover_ckpt.image import torch_load

from ._lacking import lacking

if TYPE_CHECKING:
    from ._types import Path, StateDict

__all__ = ["CheckpointEngine"]

MODEL_STATES, OPTIM_STATES = "model_states", "optim_states"  # the names of the usual files
_NAMES = {"model_states.pt": MODEL_STATES, "model_optim_rng.pt": MODEL_STATES,
          "optim_states.pt": OPTIM_STATES, "distrib_optim.pt": OPTIM_STATES}

__getattr__ = lacking(__name__, dict(
    dict.fromkeys(["start_async_save", "start_saver_process", "wait_socket_server"],
                  "there is nothing to start, dlrover-run starts the checkpoint daemon"),
    **dict.fromkeys(["ReadyTensor", "check_all_rank_ready", "verify_all_rank_step_consistent"],
                    "the ranks agree by themselves in save and load"),
    timer="the log has the time of each save"))


def name_of(path: str) -> str:
    """The name under which DLRover keeps the content of a file: for files that it does not know, that of the file."""
    base = os.path.basename(path)
    return next((name for end, name in _NAMES.items() if base.endswith(end)), base)


class CheckpointEngine:
    """Saves and loads the files that each rank contributes.

    storage       PosixDiskStorage, PosixStorageWithDeletion or None; TypeError for another
    comm_backend  accepted for compatibility; the backend depends on the data to be sent
    The other arguments are those of the checkpointers.
    """

    framework = "torch"
    checkpoint_dir: Path
    storage: Optional[CheckpointStorage]

    def __init__(self, checkpoint_dir: Path, storage: Optional[CheckpointStorage], comm_backend: str = "",
                 save_timeout: float = 600, replica_count: int = 0) -> None:
        self.checkpoint_dir = checkpoint_dir
        self.storage = storage
        self._checkpointer = self._make(deletion_strategy=deletion_strategy_of(storage), save_timeout=save_timeout,
                                        replica_count=replica_count)

    def _make(self, **settings: Any) -> Any:
        return Checkpointer(self.checkpoint_dir, self.framework, **settings)

    def _trackers(self, step: int, files: List[str]) -> List[Tuple[str, str]]:
        return []

    @property
    def latest_step(self) -> int:
        """The step that was saved or loaded last, 0 = none."""
        return int(self._checkpointer.engine.latest_step)

    def save_to_memory(self, step: int, state_dict: Mapping[str, StateDict], paths: Mapping[str, Path]) -> bool:
        """Saves {name: state dict} to memory; paths has the path of the file of each name. All ranks call it.

        When it returns, the save survives the process, and the tensors may change. False: it was skipped, the log says
        why. KeyError: a name has no path. ValueError, TypeError: the step is none.
        """
        return self._save(step, state_dict, paths, StorageType.MEMORY)

    def save_to_storage(self, step: int, state_dict: Mapping[str, StateDict], paths: Mapping[str, Path]) -> bool:
        """save_to_memory, and then to disk in the background: wait_latest_checkpoint returns when it is durable."""
        return self._save(step, state_dict, paths, StorageType.DISK)

    def _save(self, step: int, state_dict: Mapping[str, StateDict], paths: Mapping[str, Path],
              storage_type: StorageType) -> bool:
        capture = Capture(self.checkpoint_dir)
        files = {capture.path_in(paths[name]) or os.path.abspath(paths[name]): state
                 for name, state in state_dict.items()}
        return bool(self._checkpointer.save(int(step), files, storage_type, self._trackers(int(step), sorted(files))))

    def save_state_dict_to_memory(self, state_dict: Mapping[str, StateDict], conf: Any) -> bool:
        """save_to_memory with an object that has step and paths."""
        return self.save_to_memory(conf.step, state_dict, conf.paths)

    def get_state_dict_from_memory(self) -> Tuple[int, Dict[str, Any]]:
        """(step, {name: state dict}) of this rank's files in memory; (0, {}): there is nothing, or the disk is newer.

        A rank that did not save the model itself gets the one model that there is.
        """
        found = self.find(lambda step, names: self._model(names))
        if found is None or found.loaded.source != "memory":
            return 0, {}
        return found.loaded.step, {name_of(path): torch_load(view) for path, view in found.loaded.files.items()}

    def find(self, want: Want) -> Optional[Found]:
        """The newest checkpoint that all ranks can load; all ranks call it together. See dlrover_ckpt.adapter."""
        found: Optional[Found] = self._checkpointer.find(want)
        return found

    def _model(self, names: List[str]) -> List[str]:
        models = [name for name in names if name_of(name) == MODEL_STATES]
        return models if len(models) == 1 else []

    def load(self, resume_path: Path = "") -> Any:
        """The state dicts in memory by name, {} when there are none."""
        return self.get_state_dict_from_memory()[1]

    def wait_latest_checkpoint(self, timeout: float = 1800) -> Any:
        """Waits, at most timeout seconds, until the newest save to disk is durable.

        TimeoutError: it is not by then. RuntimeError: it never will be, and why.
        """
        return self._checkpointer.engine.wait(timeout=timeout)

    def get_saving_ranks(self) -> Optional[List[int]]:
        """The ranks that save; None: all."""
        return None

    def get_local_shard_num(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def get_global_shard_num(self) -> int:
        return int(self._checkpointer.engine.shards)

    def close(self) -> None:
        """Does nothing: the saves in memory are for the next process."""
