"""Segments open for reading: those of this process, of other workers of the node, and copies from other nodes."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Dict, List, Optional, Tuple

from . import segment
from .pool import Pool
from .segment import Buffer, Damaged, Header, Loan, Mapping

_LOCK_PATIENCE = 10.0  # seconds; a worker that is being killed may hold a segment for a moment
_VIEW_PATIENCE = 30.0  # seconds that views may keep another worker's segment out of use


class SegmentReader:
    """A segment open for reading, as a context. Our own are read through their one descriptor, and lent views keep them
    out of use. Segments of other workers stay locked while views live, for a while.

    Damaged: the name is none. OSError: it cannot be opened.
    """

    def __init__(self, runtime: str, name: str, own: Optional[Pool]) -> None:
        """name is relative to the runtime directory; own are the segments of this process."""
        parts = name.split("/")
        if len(parts) != 2 or parts[0] not in ("seg", "peer") or parts[1].startswith("."):
            raise Damaged("%r is not the name of a segment" % name)
        self._path = os.path.join(runtime, name)
        self._pool = own if parts[0] == "seg" else None
        self._own: Optional[Buffer] = None
        self._key: Optional[Tuple[int, int]] = None  # of a borrowed one
        self._fd = -1

    def __enter__(self) -> "SegmentReader":
        if self._pool is not None:
            self._pool.hold()  # the preparation must not put another file in its place
        try:
            self._own = self._pool.by_name(self._path) if self._pool is not None else None
            if self._own is not None:
                self._fd = self._own.fd
            else:
                self._fd, self._key = _borrowed.take(self._path)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        if self._own is not None:
            segment.unlock(self._fd)
        if self._key is not None:
            _borrowed.give_back(self._key)
        self._release()

    def _release(self) -> None:
        if self._pool is not None:
            self._pool.guard.release()

    def read(self) -> Tuple[Header, Optional[Dict[str, Any]]]:
        """The header, and the description when the save is complete."""
        return segment.read_save(self._fd)

    def lend(self, save: str) -> Tuple[Header, Dict[str, Any], Dict[str, memoryview]]:
        """The header, the description and the files of the save with this id, as private views that stay valid.

        Damaged: another save is in the segment, or another process writes to it for long.
        """
        self._lock_shared()
        h, meta = self.read()
        if meta is None or meta["save"] != save:
            raise Damaged("it was overwritten")
        m = Mapping(self._fd, os.fstat(self._fd).st_size, private=True)
        view = m.view
        files = {f["path"]: view[h.image_off + f["off"]:h.image_off + f["off"] + f["len"]] for f in meta["files"]}
        self._keep_for(Loan(m))
        return h, meta, files

    def _lock_shared(self) -> None:
        deadline = time.monotonic() + _LOCK_PATIENCE
        while not segment.lock(self._fd, False):
            if time.monotonic() > deadline:
                raise Damaged("it is locked by another process")
            time.sleep(0.05)

    def _keep_for(self, loan: Loan) -> None:
        if self._own is not None:
            self._own.loans.append(loan)
            return
        assert self._key is not None
        threading.Thread(target=_give_back, args=(self._key, loan), name="dlrover-ckpt-views", daemon=True).start()
        self._key = None  # the thread gives it back


class _Borrowed:
    """Segments of others that this process has open, by device and inode. There is one descriptor of each: closing
    another one of the same file would drop the lock that the first one holds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: Dict[Tuple[int, int], List[int]] = {}  # -> [descriptor, users]

    def take(self, path: str) -> Tuple[int, Tuple[int, int]]:
        with self._lock:
            st = os.stat(path, follow_symlinks=False)
            key = (st.st_dev, st.st_ino)
            if key not in self._users:
                fd = segment.open_segment(path)
                st = os.fstat(fd)
                key = (st.st_dev, st.st_ino)
                self._users.setdefault(key, [fd, 0])
            self._users[key][1] += 1
            return self._users[key][0], key

    def give_back(self, key: Tuple[int, int]) -> None:
        with self._lock:
            self._users[key][1] -= 1
            if self._users[key][1] == 0:
                os.close(self._users.pop(key)[0])


_borrowed = _Borrowed()


def _give_back(key: Tuple[int, int], loan: Loan) -> None:
    """Unlocks another worker's segment when its views are gone, or have been made independent of it."""
    deadline = time.monotonic() + _VIEW_PATIENCE
    while not loan.free() and time.monotonic() < deadline:
        time.sleep(0.2)
    while not loan.detach():
        time.sleep(5.0)
    _borrowed.give_back(key)
