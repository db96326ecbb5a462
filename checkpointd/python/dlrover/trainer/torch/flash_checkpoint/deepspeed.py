"""Flash checkpoints for DeepSpeed engines, ZeRO stages 0 to 3.

DeepSpeed writes and reads its files through the object in ``engine.checkpoint_engine``. For the duration of a call that
object is ours: it collects DeepSpeed's saves, answers its loads from memory, and passes on all other calls.

DeepSpeed's tracker, ``latest``, moves when the checkpoint is committed and not before.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

from dlrover.python.common.storage import (CheckpointConstant, CheckpointDeletionStrategy, CheckpointStorage,
                                           get_checkpoint_storage)
from dlrover_ckpt import sync
from dlrover_ckpt.adapter import Capture, Checkpointer, Found, check_storage_type

from ._lacking import lacking, with_native
from .checkpointer import Checkpointer as _Interface
from .checkpointer import StorageType
from .deepspeed_engine import DeepSpeedCheckpointEngine
from .engine import name_of

if TYPE_CHECKING:
    from ._types import Path, StateDict

__all__ = ["StorageType", "DeepSpeedCheckpointer", "AsyncCheckpointAgent", "DeepSpeedCheckpointEngine",
           "CheckpointConstant", "CheckpointStorage", "get_checkpoint_storage"]

__getattr__ = with_native(lacking(__name__, {}))

TRACKER_FILE = "latest"


class DeepSpeedCheckpointer(_Interface):
    """Saves and loads the state of a DeepSpeedEngine. Every rank makes one, and all make the same calls.

    engine             the result of deepspeed.initialize
    checkpoint_dir     where checkpoints are saved
    comm_backend       accepted for compatibility; the backend depends on the data to be sent
    deletion_strategy  a CheckpointDeletionStrategy; None keeps all checkpoints
    save_timeout       seconds after which a save to disk that not all ranks have finished is aborted
    replica_count      on how many nodes a checkpoint in memory is kept; 0 and 1: on its own only
    drop_superseded    whether a save to disk may take the place of an older one that waits for the disk, when there is
                       no room for both; else training waits

    Raises ValueError when optimizer states are on NVMe: DeepSpeed copies those files past its checkpoint engine; and
    when DeepSpeed is older than 0.7, or checkpoint_dir is empty. OSError: the directory cannot be made.
    """

    engine: Any  # DeepSpeedEngine
    checkpoint_dir: Path
    storage: CheckpointStorage  # for small files of the caller's own

    def __init__(self, engine: Any, checkpoint_dir: Path, comm_backend: str = "",
                 deletion_strategy: Optional[CheckpointDeletionStrategy] = None, save_timeout: float = 600,
                 replica_count: int = 0, drop_superseded: bool = False) -> None:
        if _is(engine, "zero_nvme_offload_optimizer"):
            raise ValueError("flash checkpoints cannot hold optimizer states on NVMe: use DeepSpeed's own "
                             "save_checkpoint, or set offload_optimizer.device to cpu or none")
        if getattr(engine, "checkpoint_engine", None) is None:
            raise ValueError("this DeepSpeed has no checkpoint engines: version 0.7 or later is needed")
        self.engine = engine
        self.checkpoint_dir = checkpoint_dir
        self.storage = get_checkpoint_storage(deletion_strategy)
        self._checkpointer = Checkpointer(checkpoint_dir, "deepspeed", deletion_strategy=deletion_strategy,
                                          save_timeout=save_timeout, replica_count=replica_count,
                                          drop_superseded=drop_superseded)

    def save_checkpoint(self, save_dir: Path, tag: Any = None,  # type: ignore[override]
                        client_state: Mapping[str, Any] = {}, save_latest: bool = True,
                        storage_type: StorageType = StorageType.DISK, **deepspeed_args: Any) -> bool:
        """Saves to memory, or to memory and then to disk in the background; all ranks call it.

        tag            the step, or a name that ends with it; None: global_step<engine.global_steps>
        save_latest    whether ``latest`` names this checkpoint once it is committed
        The rest is as in DeepSpeedEngine.save_checkpoint. save_dir must be the directory of this checkpointer.

        When it returns, the save is in shared memory and survives the process, and training may go on; with
        StorageType.DISK, wait_latest_checkpoint() returns when it is durable. False: it was skipped, the log says why.
        ValueError: another directory, or no storage type. Without a daemon, or without room in shared memory, a DISK
        save is written before this returns: then it is durable, or there is RuntimeError or OSError with the reason.
        """
        check_storage_type(storage_type)
        if os.path.realpath(save_dir) != os.path.realpath(self.checkpoint_dir):
            raise ValueError("save_dir is %s, but this checkpointer saves to %s: make another for it"
                             % (save_dir, self.checkpoint_dir))
        tag = "global_step%d" % self.engine.global_steps if tag is None else str(tag)
        capture = Capture(save_dir)
        with self._answering(_Saving(self.engine.checkpoint_engine, capture)):
            self.engine.save_checkpoint(save_dir, tag, client_state=client_state, save_latest=False, **deepspeed_args)
        trackers = [(TRACKER_FILE, tag)] if save_latest else []
        return self._checkpointer.save(self._step(tag), capture.files, storage_type, trackers)

    def load_checkpoint(self, load_dir: Path, tag: Any = None,  # type: ignore[override]
                        load_module_strict: bool = True, load_optimizer_states: bool = True,
                        load_lr_scheduler_states: bool = True, load_module_only: bool = False,
                        custom_load_fn: Optional[Callable[..., Any]] = None
                        ) -> Tuple[Optional[str], Optional[Dict[str, Any]]]:
        """Loads the newest checkpoint, or that of tag, from memory if it is there; all ranks call it.

        The arguments and the result (path, client state) are those of DeepSpeedEngine.load_checkpoint. Checkpoints
        that were written without this class are loaded as DeepSpeed does it.
        """
        arguments = dict(load_module_strict=load_module_strict, load_optimizer_states=load_optimizer_states,
                         load_lr_scheduler_states=load_lr_scheduler_states, load_module_only=load_module_only,
                         custom_load_fn=custom_load_fn)
        found = self._find(load_dir, tag)
        if found is None:
            result: Tuple[Optional[str], Optional[Dict[str, Any]]]
            result = self.engine.load_checkpoint(load_dir, tag, **arguments)
            return result
        with found.shown({}) as directory, self._answering(_Loading(self.engine.checkpoint_engine, found)):
            path, state = self.engine.load_checkpoint(directory, _tag(found.names), **arguments)
        return path and os.path.join(str(load_dir), os.path.relpath(path, directory)), state

    def wait_latest_checkpoint(self, timeout: float = 1800) -> int:
        """Waits until the newest checkpoint that was saved to disk is durable, and returns its step.

        timeout is in seconds. TimeoutError: it is not by then. RuntimeError: it never will be, and why.
        """
        return self._checkpointer.engine.wait(timeout=timeout)

    def _step(self, tag: str) -> int:
        digits = re.search(r"\d+$", tag)
        return int(digits.group()) if digits else int(self.engine.global_steps)

    @contextlib.contextmanager
    def _answering(self, checkpoint_engine: "_Between") -> Iterator[None]:
        own = self.engine.checkpoint_engine
        self.engine.checkpoint_engine = checkpoint_engine
        try:
            yield
        finally:
            self.engine.checkpoint_engine = own

    def _find(self, load_dir: Any, tag: Any) -> Optional[Found]:
        """The checkpoint to load in DeepSpeed's place; None: DeepSpeed finds it by itself."""
        if os.path.realpath(load_dir) != os.path.realpath(self.checkpoint_dir):
            return None
        if _is(self.engine, "load_universal_checkpoint"):
            return None
        found = self._checkpointer.find(self._want)
        if found is None or tag is not None and _tag(found.names) != str(tag):
            return None
        if tag is None and found.loaded.source == "disk" and _foreign(str(load_dir), _tag(found.names)):
            return None
        return found

    def _want(self, step: int, names: List[str]) -> Optional[List[str]]:
        """The files that this rank is going to load.

        None: not known, because experts or elastic ZeRO spread the state of a rank over the files of several.
        """
        engine = self.engine
        if _is(engine, "zero_elastic_checkpoint") or getattr(engine, "has_moe_layers", False):
            return None
        directory = os.path.join("/", _tag(names))
        layers = [engine.module.ckpt_layer_path(directory, i)
                  for i in range(len(getattr(engine.module, "forward_funcs", ())))]
        model = engine._get_ckpt_name("/", _tag(names))
        if model[1:] not in names:
            return None
        return [path[1:] for path in layers + [model] if path[1:] in names]  # a layer without state has no file


class AsyncCheckpointAgent:
    """A checkpoint engine of DeepSpeed's that keeps its state dicts, for an engine to save them.

    state_dict  {name: state dict}
    paths       {name: the path of its file}

    The name is that of the kind, CheckpointConstant.MODEL_STATES_NAME or OPTIM_STATES_NAME, else that of the file.
    Entries for DeepSpeed to load from memory are put into state_dict. DeepSpeedCheckpointer does not use it.
    """

    def __init__(self, storage: CheckpointStorage) -> None:
        self.state_dict: Dict[str, Any] = {}
        self.paths: Dict[str, str] = {}
        self.storage = storage
        self.name = "AsyncCheckpointAgent"

    def create(self, tag: Any) -> None:
        pass

    def makedirs(self, path: Path, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: StateDict, path: Any, *args: Any, **kwargs: Any) -> None:
        """Keeps a state dict. One that is not for the path of a file is written by torch.save."""
        if not isinstance(path, str):
            from torch.serialization import save  # torch.save may be this very function

            save(state_dict, path, *args, **kwargs)
            return
        name = name_of(path)
        if name:
            self.state_dict[name] = state_dict
            self.paths[name] = path

    def load(self, path: Any, map_location: Any = None) -> Any:
        """The state dict of this kind, else the file; {} when there is none."""
        from torch.serialization import load

        name = name_of(path)
        if name in self.state_dict and name != os.path.basename(path):
            return self.state_dict[name]
        return self.storage.read_state_dict(path, lambda path: load(path, map_location, weights_only=False))

    def commit(self, tag: Any) -> bool:
        return True

    def wait(self) -> None:
        pass

    def cleanup(self) -> None:
        pass

    def set_commit_info(self, info: Any) -> None:
        pass

    def get_commit_info(self) -> Any:
        return None

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        return False

    def preserves_storage_sharing(self) -> bool:
        return True


class _Between:
    """Wraps DeepSpeed's checkpoint engine and passes on the calls that it does not handle."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create(self, info: Any) -> None:
        pass

    def commit(self, info: Any) -> bool:
        return True

    def is_decoupled(self) -> bool:
        return False


class _Saving(_Between):
    def __init__(self, own: Any, capture: Capture) -> None:
        super().__init__(own)
        self._capture = capture

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if self._capture.path_in(path) in (None, "."):
            os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str, *args: Any, **kwargs: Any) -> None:
        self._capture.save(state_dict, path)


class _Loading(_Between):
    def __init__(self, own: Any, found: Found) -> None:
        super().__init__(own)
        self._found = found

    def load(self, path: str, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self._found.loaded.source == "disk":
            return self._own.load(self._found.file(path), map_location, *args, **kwargs)
        return self._found.load(path)


def _is(engine: Any, name: str) -> bool:
    """Asks an engine something that not every version of DeepSpeed knows."""
    return hasattr(engine, name) and bool(getattr(engine, name)())


def _tag(names: List[str]) -> str:
    """The directory that all files of one checkpoint are in."""
    return names[0].split("/")[0] if names else ""


def _foreign(directory: str, tag: str) -> bool:
    """Whether DeepSpeed's tracker names a checkpoint that was written without us."""
    try:
        text = sync.read_tracker(os.path.join(directory, TRACKER_FILE))
    except (OSError, ValueError):
        return False
    digits = re.search(r"\d+$", text)
    manifest = os.path.join(directory, ".dlrover", "%d.json" % int(digits.group())) if digits else ""
    return text != tag and os.path.isdir(os.path.join(directory, text)) and not os.path.exists(manifest)
