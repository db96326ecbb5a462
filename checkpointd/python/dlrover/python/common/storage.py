"""Checkpoint storage on a POSIX file system, and the rules by which old checkpoints are deleted.

Checkpoints themselves are written by the checkpoint engine. These classes say which steps to keep, and read and write
small files for programs that call them directly.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from abc import ABCMeta, abstractmethod
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Union

from dlrover_ckpt.sync import sync_dir

from .unless_installed.constants import CheckpointConstant as CheckpointConstant  # part of this module, too

TRACKER_FILE = CheckpointConstant.TRACER_FILE_NAME

logger = logging.getLogger("dlrover")

Path = Union[str, "os.PathLike[str]"]


class ClassMeta(SimpleNamespace):  # dataclasses take longer to import than all of this module
    """Names a class and the arguments that make an equal object."""

    module_path: str
    class_name: str
    kwargs: Dict[str, Any]

    def __init__(self, module_path: str = "", class_name: str = "", kwargs: Optional[Dict[str, Any]] = None) -> None:
        super().__init__(module_path=module_path, class_name=class_name, kwargs={} if kwargs is None else kwargs)


class CheckpointStorage(metaclass=ABCMeta):
    """The operations of a storage. Paths are strings or path objects."""

    @abstractmethod
    def write(self, content: Union[str, bytes], path: Path) -> None:
        """Writes a string or bytes."""

    @abstractmethod
    def write_state_dict(self, state_dict: Any, path: Path, write_func: Callable[[Any, str], Any]) -> None:
        """Calls write_func(state_dict, path) to write a state dict."""

    @abstractmethod
    def read(self, path: Path) -> Any:
        """Returns the content as a string; "" when there is no such file."""

    @abstractmethod
    def read_state_dict(self, path: Path, read_func: Optional[Callable[[Path], Any]]) -> Any:
        """Returns read_func(path); {} when there is no such file."""

    @abstractmethod
    def safe_rmtree(self, dir: Path) -> None:
        """Removes a directory; a missing one is no error."""

    @abstractmethod
    def safe_remove(self, path: Path) -> None:
        """Removes a file; a missing one is no error."""

    @abstractmethod
    def safe_makedirs(self, dir: Path) -> None:
        """Makes a directory and its parents."""

    @abstractmethod
    def safe_move(self, src_path: Path, dst_path: Path) -> None:
        """Moves a file or directory unless the target exists."""

    @abstractmethod
    def commit(self, step: int, success: bool) -> None:
        """Says that a step was saved, or that it failed."""

    @abstractmethod
    def exists(self, path: Path) -> bool:
        """Reports whether a file or directory exists."""

    @abstractmethod
    def listdir(self, path: Path) -> List[str]:
        """Returns the names in a directory."""

    def get_class_meta(self) -> ClassMeta:
        """Names the class and the arguments that make an equal storage."""
        return ClassMeta(module_path=type(self).__module__, class_name=type(self).__name__, kwargs=self._arguments())

    def _arguments(self) -> Dict[str, Any]:
        return {}


class PosixDiskStorage(CheckpointStorage):
    """Files on a local or mounted file system. Nothing is ever written in place."""

    def write(self, content: Union[str, bytes], path: Path) -> None:
        """Writes a string or bytes, durably: after a crash the old content is there, or the new one.

        Raises OSError when the directory does not exist. A string is written in UTF-8.
        """
        data = content.encode() if isinstance(content, str) else content
        _replace(path, lambda tmp: _write_bytes(tmp, data))

    def write_state_dict(self, state_dict: Any, path: Path,
                         write_func: Optional[Callable[[Any, str], Any]] = None) -> None:
        """Writes a file with write_func(state_dict, path), durably; the directory is made."""
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        if write_func is not None:
            _replace(path, lambda tmp: write_func(state_dict, tmp))

    def read(self, path: Path, mode: str = "r") -> Any:
        try:
            with open(path, mode) as stream:
                return stream.read()
        except FileNotFoundError:
            return ""

    def read_state_dict(self, path: Path, read_func: Optional[Callable[[Path], Any]]) -> Any:
        if read_func is None or not os.path.exists(path):
            return {}
        return read_func(path)

    def safe_rmtree(self, dir: Path) -> None:
        shutil.rmtree(dir, ignore_errors=True)

    def safe_remove(self, path: Path) -> None:
        try:
            os.remove(path)
        except FileNotFoundError:
            pass

    def safe_makedirs(self, dir: Path) -> None:
        os.makedirs(dir, exist_ok=True)

    def safe_move(self, src_path: Path, dst_path: Path) -> None:
        if os.path.exists(src_path) and not os.path.exists(dst_path):
            shutil.move(src_path, dst_path)

    def commit(self, step: int, success: bool) -> None:
        logger.info("checkpoint of step %s %s", step, "is saved" if success else "was not saved")

    def exists(self, path: Path) -> bool:
        return os.path.exists(path)

    def listdir(self, path: Path) -> List[str]:
        return os.listdir(path)


class CheckpointDeletionStrategy(metaclass=ABCMeta):
    """Decides which old checkpoints are deleted."""

    @abstractmethod
    def clean_up(self, step: int, delete_func: Callable[[str], None]) -> None:
        """Is called after a newer step was committed, with the step that was the newest until then.

        delete_func(path) removes a directory.
        """

    def retention(self) -> Optional[Dict[str, int]]:
        """The rule as data, {"keep_latest": n} or {"keep_interval": n}; None: clean_up has to be called.

        A rule as data is executed at each commit, from the manifests on disk. It outlives the process.
        """
        return None


class KeepStepIntervalStrategy(CheckpointDeletionStrategy):
    """Keeps the newest checkpoint and those whose step is a multiple of keep_interval.

    checkpoint_dir is the directory that has the directories of the steps.
    """

    def __init__(self, keep_interval: int, checkpoint_dir: str) -> None:
        if keep_interval < 1:
            raise ValueError("keep_interval is %s, it must be at least 1" % keep_interval)
        self._keep_interval = keep_interval
        self._checkpoint_dir = checkpoint_dir

    def clean_up(self, step: int, delete_func: Callable[[str], None]) -> None:
        if step % self._keep_interval:
            _delete(self._path(step), delete_func)

    def retention(self) -> Optional[Dict[str, int]]:
        if _own(self, KeepStepIntervalStrategy):
            return {"keep_interval": self._keep_interval}
        return None

    def _path(self, step: int) -> str:
        return os.path.join(self._checkpoint_dir, str(step))


class KeepLatestStepStrategy(CheckpointDeletionStrategy):
    """Keeps the newest max_to_keep checkpoints, at least one.

    checkpoint_dir is the directory that has the directories of the steps.
    """

    def __init__(self, max_to_keep: int, checkpoint_dir: str) -> None:
        self._max_to_keep = max(max_to_keep, 1)
        self._checkpoint_dir = checkpoint_dir
        self._steps: List[int] = []

    def clean_up(self, step: int, delete_func: Callable[[str], None]) -> None:
        self._steps.append(step)
        if len(self._steps) >= self._max_to_keep:
            _delete(self._path(self._steps.pop(0)), delete_func)

    def retention(self) -> Optional[Dict[str, int]]:
        if _own(self, KeepLatestStepStrategy):
            return {"keep_latest": self._max_to_keep}
        return None

    def _path(self, step: int) -> str:
        return os.path.join(self._checkpoint_dir, str(step))


class PosixStorageWithDeletion(PosixDiskStorage):
    """A storage that deletes old checkpoints: write the tracker file, then call commit."""

    def __init__(self, tracker_file: str, deletion_strategy: CheckpointDeletionStrategy) -> None:
        super().__init__()
        self._deletion_strategy = deletion_strategy
        self._tracker_file = tracker_file
        self._pre_step = 0

    @property
    def deletion_strategy(self) -> CheckpointDeletionStrategy:
        return self._deletion_strategy

    def write(self, content: Union[str, bytes], path: Path) -> None:
        if os.path.basename(str(path)) == os.path.basename(self._tracker_file):
            self._pre_step = _step(self.read(path), self._pre_step)
        super().write(content, path)

    def commit(self, step: int, success: bool) -> None:
        super().commit(step, success)
        if success and self._pre_step not in (0, step):
            self._deletion_strategy.clean_up(self._pre_step, shutil.rmtree)

    def _arguments(self) -> Dict[str, Any]:
        return {"tracker_file": self._tracker_file, "deletion_strategy": self._deletion_strategy}


def get_checkpoint_storage(deletion_strategy: Optional[CheckpointDeletionStrategy] = None) -> PosixDiskStorage:
    """Returns the storage for a deletion strategy, or the plain one."""
    if deletion_strategy is None:
        return PosixDiskStorage()
    return PosixStorageWithDeletion(TRACKER_FILE, deletion_strategy)


def deletion_strategy_of(storage: Optional[CheckpointStorage]) -> Optional[CheckpointDeletionStrategy]:
    """The deletion strategy of a storage that the engine can stand in for; None: it has none.

    Raises TypeError for a storage of the caller's own: its files would be written elsewhere than its author meant.
    """
    if storage is None or type(storage) is PosixDiskStorage:
        return None
    if isinstance(storage, PosixStorageWithDeletion) and type(storage) is PosixStorageWithDeletion:
        return storage.deletion_strategy
    raise TypeError("checkpoints cannot be written through %s: mount that storage as a file system, and pass "
                    "a deletion strategy or PosixStorageWithDeletion" % type(storage).__name__)


def _own(strategy: CheckpointDeletionStrategy, cls: Any) -> bool:
    """Whether clean_up is the one of cls, not one that a subclass has put in its place."""
    return bool(type(strategy).clean_up is cls.clean_up)


def _delete(path: str, delete_func: Callable[[str], None]) -> None:
    """Deletes one step. A failure is no reason to stop the training."""
    try:
        delete_func(path)
        logger.info("old checkpoint %s deleted", path)
    except Exception as e:
        logger.warning("cannot delete the old checkpoint %s: %s", path, e)


def _step(text: str, otherwise: int) -> int:
    """The step in a tracker file. A damaged tracker must not stop a save."""
    try:
        return int(text)
    except ValueError:
        return otherwise


def _replace(path: Path, write: Callable[[str], Any]) -> None:
    """Has a temporary file written in the directory of path, then renames it to path."""
    path = os.path.abspath(path)
    fd, tmp = tempfile.mkstemp(prefix=".%s." % os.path.basename(path), suffix=".tmp", dir=os.path.dirname(path))
    os.close(fd)
    try:
        write(tmp)
        os.chmod(tmp, 0o666 & ~_umask())
        _sync(tmp)
        os.replace(tmp, path)
    except BaseException:
        os.unlink(tmp)
        raise
    sync_dir(os.path.dirname(path))


def _write_bytes(path: str, data: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(data)


def _umask() -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
