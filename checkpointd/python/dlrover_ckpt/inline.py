"""Saves that the worker itself writes to disk, because there is no daemon, or no room in shared memory."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from . import sync
from .image import Image

log = logging.getLogger("dlrover.ckpt")

_LOCK_PATIENCE = 30.0  # seconds that the daemon may take to complete another save of the directory

Gather = Callable[[Any], List[Any]]


class InlineWriter:
    """Writes this rank's shards into one checkpoint directory, and commits them."""

    def __init__(self, dir: str, runtime: str) -> None:
        """runtime: the daemon's directory, "" without a daemon."""
        self._dir = dir
        self._runtime = runtime
        self._mount: Optional[Dict[str, Tuple[int, int]]] = None  # of the directory, once a save was committed

    def write(self, meta: Dict[str, Any], images: Sequence[Image], gather: Optional[Gather]) -> None:
        """Returns when the save is committed: durable, and named by the trackers. Raises sync.SaveFailed otherwise.

        gather: the collective of all ranks when all write together; None: this rank writes the whole save.
        """
        files: List[Dict[str, Any]] = []
        error, mount = "", self._mount
        with self._at_work(meta):
            if meta["primary"]:
                try:
                    if self._mount is not None:
                        sync.still_there(self._dir, self._mount)
                    files = sync.write_shard(meta, images)
                    mount = sync.mount_identity(self._dir)
                except (OSError, ValueError) as e:
                    error = "rank %d: %s" % (meta["rank"], e)
            self.commit(meta, files, error, gather)
        self._mount = mount

    def commit(self, meta: Dict[str, Any], files: List[Dict[str, Any]], error: str, gather: Optional[Gather]) -> None:
        """Commits the written files. error: the reason of a failed write, "" = it worked. Raises sync.SaveFailed."""
        sync.commit(meta, files, error, gather, self.directory_lock)

    @contextlib.contextmanager
    def _at_work(self, meta: Dict[str, Any]) -> Iterator[None]:
        """Keeps a file locked while the save is written. A daemon that is started meanwhile would otherwise take it for
        an unfinished one, and remove its files. The lock ends with the process."""
        fd, path = -1, ""
        if self._runtime and meta["primary"]:
            path = os.path.join(self._runtime, "writing-%s.%d" % (meta["save"], meta["shard"]))
            try:
                fd = _open(path)
                _locked(fd)
            except OSError as e:
                log.debug("a save is written that a new daemon does not know of: %s", e)
        try:
            yield
        finally:
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                os.close(fd)

    @contextlib.contextmanager
    def directory_lock(self) -> Iterator[None]:
        """The lock against other saves of the directory on this node: each reads the trackers, and may then move them.
        It ends with the process. A process that is stopped is waited for only so long."""
        if not self._runtime:  # then rank 0 alone completes saves
            yield
            return
        name = "turn-" + hashlib.sha256(self._dir.encode()).hexdigest()[:16]
        try:
            fd = _open(os.path.join(self._runtime, name))
        except OSError as e:
            log.debug("a save is completed out of turn: %s", e)
            yield
            return
        try:
            deadline = time.monotonic() + _LOCK_PATIENCE
            while not _locked(fd) and time.monotonic() < deadline:
                time.sleep(0.01)
            yield
        finally:
            os.close(fd)


class Cleaner:
    """Calls a deletion strategy that is not plain data, once for each committed step, for the old steps to remove."""

    def __init__(self, dir: str, strategy: Any) -> None:
        self._dir = dir
        self._strategy = strategy
        self._tracked: Optional[int] = None

    def clean_up(self) -> None:
        now = sync.tracked(self._dir)
        if now != self._tracked and self._tracked is not None:
            self._strategy.clean_up(self._tracked, self._delete)
        self._tracked = now

    def _delete(self, path: str) -> None:
        inside = os.path.abspath(path) + os.sep
        for m in sync.manifests(self._dir)[0]:
            if any(os.path.join(self._dir, f["path"]).startswith(inside) for f in m["files"]):
                sync.remove(self._dir, m["step"])
        shutil.rmtree(path, ignore_errors=True)


def _open(path: str) -> int:
    """A descriptor of a file to be locked."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
