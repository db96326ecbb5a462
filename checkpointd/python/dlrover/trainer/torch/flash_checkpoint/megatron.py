"""Flash checkpoints for Megatron-LM 0.4.0 and later, in its ``torch`` checkpoint format.

save_checkpoint and load_checkpoint call Megatron's own functions, so that the files are Megatron's to the last name,
those of the distributed optimizer included. Megatron offers no hook for the writing itself. For the duration of a
call, and for the calling thread alone, the global name ``torch`` of Megatron's checkpointing module, and of the modules
that define the optimizer, is therefore bound to a view of torch whose save or load is ours. The torch module stays as
it is, and code elsewhere does not notice.

Megatron's tracker, latest_checkpointed_iteration.txt, moves when the checkpoint is committed and not before.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import tempfile
import threading
import types
from typing import TYPE_CHECKING, Any, Dict, Iterable, Iterator, List, Optional, Set, Tuple, Union

from dlrover.python.common.storage import (CheckpointConstant, CheckpointStorage, KeepStepIntervalStrategy,
                                           PosixDiskStorage, deletion_strategy_of)
from dlrover_ckpt import sync
from dlrover_ckpt.adapter import Capture, Found, check_storage_type, module_with, names_replaced
from dlrover_ckpt.engine import StorageType, checked_step
from dlrover_ckpt.image import torch_load

from ._lacking import lacking, with_native
from .engine import MODEL_STATES, OPTIM_STATES, name_of
from .megatron_engine import TRACKER_FILE, MegatronCheckpointEngine, checkpointer_of

if TYPE_CHECKING:
    from ._types import Path, StateDict

__all__ = ["StorageType", "save_checkpoint", "load_checkpoint", "wait_latest_checkpoint", "MegatronCheckpointer",
           "MegatronCheckpointEngine", "CheckpointConstant", "PosixDiskStorage"]

__getattr__ = with_native(lacking(__name__, dict.fromkeys(["get_args", "megatron_save", "megatron_load"],
                                                          "import it from Megatron")))


def save_checkpoint(iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any,
                    num_floating_point_operations_so_far: float = 0, storage_type: StorageType = StorageType.DISK,
                    storage: Optional[CheckpointStorage] = None, comm_backend: str = "", save_timeout: float = 600,
                    replica_count: int = 0, drop_superseded: bool = False, **megatron_args: Any) -> bool:
    """Saves a checkpoint to memory, or to memory and then to disk in the background; all ranks call it.

    The arguments up to num_floating_point_operations_so_far, and megatron_args, are those of Megatron's
    save_checkpoint. Arguments that this version of Megatron does not know yet are not passed on.
    storage        None, PosixDiskStorage or PosixStorageWithDeletion
    comm_backend   accepted for compatibility; the backend depends on the data to be sent
    save_timeout   seconds after which a save to disk that not all ranks have finished is aborted
    replica_count  on how many nodes a checkpoint in memory is kept; 0 and 1: on its own only
    drop_superseded  whether a save to disk may take the place of an older one that waits for the disk, when there is no
                   room for both; else training waits

    When it returns, the save is in shared memory and survives the process, and training may go on; with
    StorageType.DISK, wait_latest_checkpoint() returns when it is durable. Without a daemon, or without room in shared
    memory, a DISK save is written before this returns: then it is durable, or there is RuntimeError or OSError.

    Returns False when the save was skipped; the log says why. Raises ValueError for another checkpoint format than
    torch, TypeError for another storage, and passes on Megatron's exceptions.
    """
    return save(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far, storage_type,
                megatron_args, deletion_strategy=deletion_strategy_of(storage),
                save_timeout=save_timeout, replica_count=replica_count, drop_superseded=drop_superseded)


def load_checkpoint(model: Any, optimizer: Any, opt_param_scheduler: Any, load_arg: str = "load", strict: bool = True,
                    storage: Optional[CheckpointStorage] = None, comm_backend: str = "", save_timeout: float = 600,
                    replica_count: int = 0, **megatron_args: Any) -> Any:
    """Loads the newest checkpoint, from memory if it is there, and returns the result of Megatron's load_checkpoint.

    All ranks call it. The arguments are those of Megatron's load_checkpoint and of save_checkpoint. Checkpoints that
    were written without this module are loaded as Megatron does it.
    """
    return load(model, optimizer, opt_param_scheduler, load_arg, strict, megatron_args,
                deletion_strategy=deletion_strategy_of(storage), save_timeout=save_timeout,
                replica_count=replica_count)


def wait_latest_checkpoint(timeout: float = 1800) -> int:
    """Waits until the newest checkpoint that was saved to disk is durable, and returns its iteration.

    timeout is in seconds. TimeoutError: it is not by then. RuntimeError: it never will be, and why.
    """
    checkpointing = checkpointing_module()
    return checkpointer_of(checkpointing.get_args().save).engine.wait(timeout=timeout)


def save(iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any,
         num_floating_point_operations_so_far: float, storage_type: StorageType, megatron_args: Dict[str, Any],
         **settings: Any) -> bool:
    """save_checkpoint without the defaults; settings are those of the engine."""
    check_storage_type(storage_type)
    iteration = checked_step(iteration)
    checkpointing = checkpointing_module()
    args = checkpointing.get_args()
    _check_format(args)
    _check_kind(megatron_args)
    settings["deletion_strategy"] = settings["deletion_strategy"] or _retain_interval(args)
    checkpointer = checkpointer_of(args.save, **settings)
    checkpointer.adjust(**settings)
    if "num_floating_point_operations_so_far" in inspect.signature(checkpointing.save_checkpoint).parameters:
        megatron_args = dict(megatron_args, num_floating_point_operations_so_far=num_floating_point_operations_so_far)
    capture = Capture(args.save)
    with _saves_captured(checkpointing, optimizer, capture):
        checkpointing.save_checkpoint(iteration, model, optimizer, opt_param_scheduler, **megatron_args)
    return checkpointer.save(iteration, capture.files, storage_type, [(TRACKER_FILE, str(iteration))])


def load(model: Any, optimizer: Any, opt_param_scheduler: Any, load_arg: str, strict: bool,
         megatron_args: Dict[str, Any], **settings: Any) -> Any:
    """load_checkpoint without the defaults; settings are those of the engine."""
    checkpointing = checkpointing_module()
    args = checkpointing.get_args()
    found = _find(checkpointing, args, load_arg, settings)
    if found is None:
        return checkpointing.load_checkpoint(model, optimizer, opt_param_scheduler, load_arg, strict, **megatron_args)
    step = str(found.loaded.step)
    with found.shown({TRACKER_FILE: step}) as directory, _attribute(args, load_arg, directory), \
            _loads_answered(checkpointing, optimizer, found):
        return checkpointing.load_checkpoint(model, optimizer, opt_param_scheduler, load_arg, strict, **megatron_args)


_KINDS = (MODEL_STATES, OPTIM_STATES)


class Singleton:
    """A class of which singleton_instance makes one object, with the arguments of the first call."""

    _instance: Any = None
    _making = threading.Lock()

    @classmethod
    def singleton_instance(cls, *args: Any, **kwargs: Any) -> Any:
        with cls._making:
            if cls._instance is None:
                cls._instance = cls(*args, **kwargs)
        return cls._instance


class MegatronCheckpointer(Singleton):
    """Intercepts the saves and loads of a program that saves by itself, in Megatron's way.

        checkpointer.save(state_dict, path)     # in the place of torch.save, for Megatron's two kinds of files
        checkpointer.update_tracer_file(step)   # if Megatron has moved its tracker meanwhile
        checkpointer.engine.save_to_memory(step, checkpointer.state_dict, checkpointer.paths)   # or save_to_storage
        checkpointer.state_dict.clear()

    The arguments are those of save_checkpoint. save_checkpoint and load_checkpoint do not use it.
    """

    def __init__(self, checkpoint_dir: Path, storage: Optional[CheckpointStorage] = None, comm_backend: str = "",
                 save_timeout: float = 600, replica_count: int = 0) -> None:
        self.state_dict: Dict[str, Any] = {}
        self.paths: Dict[str, str] = {}
        self.checkpoint_dir = checkpoint_dir
        self.storage = storage or PosixDiskStorage()
        self.engine = MegatronCheckpointEngine(checkpoint_dir, self.storage, comm_backend, save_timeout, replica_count)
        self._found: Optional[Found] = None
        self._unanswered: Set[str] = set()

    def save(self, state_dict: StateDict, path: Any, *args: Any, **kwargs: Any) -> None:
        """Keeps a state dict in state_dict, and its path in paths. One that is not for a path is written by torch.save.

        ValueError: the path is that of neither kind.
        """
        if not isinstance(path, str):
            from torch.serialization import save  # torch.save may be this very function

            save(state_dict, path, *args, **kwargs)
            return
        name = name_of(path)
        self._found, self._unanswered = None, set()  # its memory is needed
        if name not in _KINDS:
            raise ValueError("the path is %s, it must end with model_optim_rng.pt or distrib_optim.pt" % path)
        self.state_dict[name] = state_dict
        self.paths[name] = path

    def load(self, path: Any, **kwargs: Any) -> Any:
        """The file in memory that has this place in the newest checkpoint, else the file; {} when there is none.

        All ranks load the model, and by that agree on the checkpoint. Then each may load the optimizer's file.
        kwargs are those of torch.load.
        """
        from torch.serialization import load

        if isinstance(path, str) and Capture(self.checkpoint_dir).path_in(path) and name_of(path) in _KINDS:
            found = self._find(path)
            if found is not None and found.loaded.source == "memory":
                same = self._alike(path, found.loaded.files)
                if not same:
                    raise FileNotFoundError("there is no %s of step %d in the memory of this rank"
                                            % (os.path.basename(path), found.loaded.step))
                return torch_load(found.loaded.files[same[0]])
        kwargs = dict(dict(map_location="cpu", weights_only=False), **kwargs)
        if not isinstance(path, str):
            return load(path, **kwargs)
        return self.storage.read_state_dict(path, lambda path: load(path, **kwargs))

    def _find(self, path: str) -> Optional[Found]:
        """The newest checkpoint, for one load of each kind of file."""
        name = name_of(path)
        if name not in self._unanswered:
            self._found = self.engine.find(lambda step, names: self._alike(path, names) or None)
            self._unanswered = set(_KINDS)
        self._unanswered.discard(name)
        return self._found

    def _alike(self, path: str, names: Iterable[str]) -> List[str]:
        """Those names that differ from a path in the iteration alone."""
        def place(name: str) -> str:
            return name.partition("/")[2]

        wanted = place(Capture(self.checkpoint_dir).path_in(path) or "")
        return [name for name in names if place(name) == wanted]

    def update_tracer_file(self, iteration: int) -> None:
        """Reverts Megatron's changes for a save that is not on disk yet: its tracker names the committed step again,
        and the empty directories of the iteration are removed. A file is never removed."""
        top = os.path.join(self.checkpoint_dir, "iter_%07d" % iteration)
        for directory, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):  # it is not empty
                os.rmdir(directory)
        megatrons = os.path.join(self.checkpoint_dir, TRACKER_FILE)
        ours = os.path.join(self.checkpoint_dir, CheckpointConstant.TRACER_FILE_NAME)
        if self.storage.read(megatrons).strip() != str(iteration):
            return
        committed = None
        while committed != self.storage.read(ours):  # it may be committed at this moment
            committed = self.storage.read(ours)
            if committed:
                self.storage.write(committed, megatrons)
            else:
                self.storage.safe_remove(megatrons)


def checkpointing_module() -> types.ModuleType:
    """Megatron's checkpointing module: megatron.training.checkpointing, before 0.6 megatron.checkpointing."""
    for name in ("megatron.training.checkpointing", "megatron.checkpointing"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as e:
            if e.name is None or not (name + ".").startswith(e.name + "."):
                raise
    raise ImportError("Megatron-LM cannot be imported: put its directory on PYTHONPATH")


def _check_format(args: Any) -> None:
    if getattr(args, "use_dist_ckpt", False) or getattr(args, "ckpt_format", "torch") != "torch":
        raise ValueError("flash checkpoints of Megatron are made in its torch format: pass --ckpt-format torch, and "
                         "neither --use-dist-ckpt nor --async-save")


def _check_kind(megatron_args: Dict[str, Any]) -> None:
    for name in ("non_persistent_ckpt", "release"):
        if megatron_args.get(name):
            raise ValueError("save_checkpoint was called with %s: use Megatron's own save_checkpoint for it" % name)


def _retain_interval(args: Any) -> Optional[KeepStepIntervalStrategy]:
    """Megatron's --save-retain-interval. Megatron would delete before the new checkpoint is durable."""
    interval = getattr(args, "save_retain_interval", None)
    return KeepStepIntervalStrategy(interval, args.save) if interval else None


def _optimizer_modules(optimizer: Any) -> List[types.ModuleType]:
    """The modules that define an optimizer, and the optimizers that it is made of."""
    parts = [optimizer] + list(getattr(optimizer, "chained_optimizers", ()))
    names = {cls.__module__ for part in parts for cls in type(part).__mro__}
    return [sys.modules[name] for name in sorted(names) if name.split(".")[0] not in ("builtins", "torch", "abc")]


@contextlib.contextmanager
def _saves_captured(checkpointing: types.ModuleType, optimizer: Any, capture: Capture) -> Iterator[None]:
    """Megatron's files go to capture, its tracker to a scratch directory, and it makes no directories for them."""
    with tempfile.TemporaryDirectory(prefix="dlrover-save-") as scratch:
        def tracker_name(original: Any) -> Any:
            def name(path: Any) -> Any:
                return os.path.join(scratch, TRACKER_FILE) if capture.path_in(path) == "." else original(path)
            return name

        def ensure_directory(original: Any) -> Any:
            def ensure(filename: Any, *args: Any, **kwargs: Any) -> None:
                if capture.path_in(filename) is None:
                    original(filename, *args, **kwargs)
            return ensure

        names = {"torch": lambda torch: module_with(torch, save=capture.save),
                 "get_checkpoint_tracker_filename": tracker_name, "ensure_directory_exists": ensure_directory}
        with names_replaced([checkpointing], names), \
                names_replaced(_optimizer_modules(optimizer), {"torch": names["torch"]}):
            yield


@contextlib.contextmanager
def _loads_answered(checkpointing: types.ModuleType, optimizer: Any, found: Found) -> Iterator[None]:
    modules = [checkpointing] + [m for m in _optimizer_modules(optimizer) if m is not checkpointing]
    with names_replaced(modules, {"torch": lambda torch: module_with(torch, load=found.load)}):
        yield


@contextlib.contextmanager
def _attribute(obj: Any, name: str, value: Any) -> Iterator[None]:
    old = getattr(obj, name)
    setattr(obj, name, value)
    try:
        yield
    finally:
        setattr(obj, name, old)


def _find(checkpointing: types.ModuleType, args: Any, load_arg: str, settings: Dict[str, Any]) -> Optional[Found]:
    """The checkpoint to load in Megatron's place; None: Megatron finds it by itself."""
    load_dir = getattr(args, load_arg, None)
    if not args.save or getattr(args, "ckpt_step", None):
        return None
    elsewhere = not load_dir or os.path.realpath(load_dir) != os.path.realpath(args.save)
    if elsewhere and getattr(args, "finetune", False):
        return None
    checkpointer = checkpointer_of(args.save, **settings)

    def want(step: int, names: List[str]) -> Optional[List[str]]:
        return None if getattr(args, "auto_detect_ckpt_format", False) else [
            checkpointing.get_checkpoint_name("", step)]

    # Only the interrupted run itself has a checkpoint in memory: it continues, regardless of its first load directory.
    found = checkpointer.find(want, "memory" if elsewhere else "memory-first")
    if found is not None and found.loaded.source == "disk" and _foreign(load_dir):
        return None
    return found


def _foreign(directory: Optional[str]) -> bool:
    """Whether Megatron's tracker names a checkpoint that was written without us."""
    if not directory:
        return False
    try:
        text = sync.read_tracker(os.path.join(directory, TRACKER_FILE))
    except (OSError, ValueError):
        return False
    if not text.isdigit():
        return text == "release"
    step = "%d" % int(text)
    files = os.path.join(directory, "iter_%07d" % int(text))
    return os.path.isdir(files) and not os.path.exists(os.path.join(directory, ".dlrover", step + ".json"))
