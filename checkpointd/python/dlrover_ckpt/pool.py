"""The segments of one worker: which one the next save goes to, and getting their memory ready before it is needed."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import sys
import threading
import time
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import segment
from .segment import Buffer, Damaged

log = logging.getLogger("dlrover.ckpt")

_SHARE = 0.6  # of the free memory, at most, for all buffers
_GRAIN = 2 << 20
_GLANCE = 0.01  # seconds that a save waits for a segment when none is free


class NoRoom(Exception):
    """Shared memory does not hold the save; the text says how much there is."""


class Slot(NamedTuple):
    """What the choice of a buffer depends on."""

    index: int
    complete: bool
    saved_ns: int
    pending: bool  # the disk still wants it
    lent: bool  # views of a load need it
    dir: str = ""  # the checkpoint directory that the save belongs to


def choose(slots: Sequence[Slot], disk: bool) -> List[Tuple[int, bool]]:
    """The buffers that the next save may go to, the best first, and whether that loses something: the newest complete
    save of a directory, or (for a save that goes to the disk itself) one that waits for the disk. Locks are not known here."""
    newest: Dict[str, Slot] = {}
    for s in slots:
        if s.complete and (s.dir not in newest or s.saved_ns > newest[s.dir].saved_ns):
            newest[s.dir] = s

    def cost(s: Slot) -> Tuple[int, int]:
        if s.pending:
            return 4, s.saved_ns
        if s is newest.get(s.dir):
            return 3, s.saved_ns
        return (2 if s.lent else 1 if s.complete else 0), s.saved_ns

    return [(s.index, cost(s)[0] > 2) for s in sorted(slots, key=cost) if disk or not s.pending]


def how_many(size: int, free: int) -> int:
    """Buffers of this size for this much free memory, 0 = not one."""
    for n in (3, 2):
        if n * size <= _SHARE * free:
            return n
    return 1 if size <= free else 0


class Pool:
    """The segment files seg/l<local_rank>-<k>.seg. Made once in a process: a second descriptor of a file would drop
    the first one's lock when it is closed."""

    def __init__(self, runtime: str, local_rank: int, holders: int, free: Callable[[str], int]) -> None:
        self._seg = os.path.join(runtime, "seg")
        self._local_rank = local_rank
        self._holders = max(1, holders)  # workers on this node that share the memory
        self._free = free
        # Over the buffers: held by a save, by whoever reads one, and for a moment at a time by the preparation.
        self.guard = threading.RLock()
        self._stop = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._closed = False
        self._size = 0  # what the buffers were made for
        self.buffers: List[Buffer] = []
        self._adopt()

    def _adopt(self) -> None:
        for k in range(3):
            b = Buffer(self._path(k))
            try:
                if not b.open():
                    break
                meta = segment.read_save(b.fd)[1]
                b.dir = str(meta.get("dir")) if meta else ""
            except (OSError, Damaged, ValueError) as e:
                log.warning("segment %s is not used: %s", b.path, e)
                b.close()
            self.buffers.append(b)
        if len(self.buffers) == 3:  # else there may be room for more by now
            self._size = min(b.capacity for b in self.buffers)

    def _path(self, k: int) -> str:
        return os.path.join(self._seg, "l%d-%d.seg" % (self._local_rank, k))

    def by_name(self, name: str) -> Optional[Buffer]:
        return next((b for b in self.buffers if b.fd >= 0 and os.path.basename(b.path) == os.path.basename(name)), None)

    @property
    def capacity(self) -> int:
        return max((b.capacity for b in self.buffers), default=0)

    def acquire(self, need: int, disk: bool) -> Optional[Buffer]:
        """A buffer of at least `need` bytes, locked; None: all are in use. NoRoom: there is no memory for it.
        To be given back with release()."""
        deadline = time.monotonic() + _GLANCE
        while True:
            self.hold()
            try:
                b, making = self._find(need, disk)
            except BaseException:
                self.guard.release()
                raise
            if b is not None:
                return b
            self.guard.release()
            if making is None:
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_GLANCE / 10)  # a reader may hold a lock for a moment
                continue
            with making.making:  # its memory is being allocated: nothing may be lost meanwhile
                pass

    def hold(self) -> None:
        """Takes the guard from the preparation, which lets go of it soon."""
        self._stop.set()
        self.guard.acquire()
        self._stop.clear()

    def _find(self, need: int, disk: bool) -> Tuple[Optional[Buffer], Optional[Buffer]]:
        """A locked buffer, or one to wait for."""
        self._fit(need)
        making = next((b for b in self.buffers if b.making.locked()), None)
        for k, loses in choose(self._slots(), disk):
            b = self.buffers[k]
            if not b.making.locked() and not (loses and making) and self._take(b, need):
                return b, None
        return None, making

    def release(self, b: Buffer) -> None:
        segment.unlock(b.fd)
        self.guard.release()

    def _take(self, b: Buffer, need: int) -> bool:
        if b.fd >= 0 and not segment.lock(b.fd, True):
            return False
        if b.capacity >= need and b.lent() and not b.detach():
            segment.unlock(b.fd)
            return False
        if b.capacity < need:
            self._grow(b, need)
            if not segment.lock(b.fd, True):
                return False
        return True

    def _grow(self, b: Buffer, need: int) -> None:
        """A new file in the place of the old one; views of a load keep the old one."""
        try:
            size = _rounded(max(need, self._size))
            b.take(b.make(size, b.seq()), size)
        except OSError as e:
            if b.fd >= 0:
                segment.unlock(b.fd)
            if e.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise NoRoom("shared memory is full: %d bytes for a save were refused" % need) from e

    def _slots(self) -> List[Slot]:
        out = []
        for k, b in enumerate(self.buffers):
            try:
                h = b.header() if b.fd >= 0 else None
            except Damaged:
                h = None
            if h is None:
                out.append(Slot(k, False, 0, False, b.lent()))
            else:
                out.append(Slot(k, h.state == segment.COMPLETE, h.saved_ns, h.pending, b.lent(), b.dir))
        return out

    def _fit(self, need: int) -> None:
        """As many buffers as the memory allows for saves of this size."""
        if need <= self._size and self.buffers:
            return
        own = sum(b.capacity for b in self.buffers)
        n = how_many(_rounded(need), self._free(self._seg) // self._holders + own)
        if n == 0:
            raise NoRoom("a save of %d bytes does not fit into shared memory: %d bytes are free for each worker"
                         % (need, self._free(self._seg) // self._holders))
        if n == 1:
            log.warning("shared memory has room for one save only: the newest is lost while the next is written; "
                        "make it larger (for example with --shm-size)")
        while len(self.buffers) < n:
            self.buffers.append(Buffer(self._path(len(self.buffers))))
        for b in self.buffers[n:]:
            if not b.making.locked() and self._spare(b, 1):
                b.remove()
                self.buffers.remove(b)
        self._size = need

    def prepare(self, need: int) -> None:
        """Makes buffers of `need` bytes and faults them in, in the background. Does nothing while it is at it."""
        with self.guard:
            done = bool(self.buffers) and need <= self._size and all(b.ready for b in self.buffers)
            if done or self._closed or (self._thread is not None and self._thread.is_alive()):
                return
            try:
                self._fit(need)
            except NoRoom as e:
                log.info("%s", e)
                return
            self._thread = threading.Thread(target=self._prepare, args=(need,), name="dlrover-ckpt-prepare",
                                            daemon=True)
            self._thread.start()

    def prepared(self, timeout: Optional[float] = None) -> bool:
        """Waits for the preparation. False: it is not finished."""
        with self.guard:
            t = self._thread
        if t is not None:
            t.join(timeout)
        return t is None or not t.is_alive()

    def close(self) -> None:
        """Waits for the preparation, allows no other, and lets go of the segments. The files stay."""
        with self.guard:
            self._closed = True
        self.prepared()
        for b in self.buffers:
            b.close()

    def remove(self) -> None:
        """Removes the segments, and the directory if it was the last that used it. Follows close()."""
        for b in self.buffers:
            try:
                os.unlink(b.path)
            except OSError:
                pass  # there was none
        for d in (self._seg, os.path.dirname(self._seg)):
            try:
                os.rmdir(d)
            except OSError:
                return  # others use it

    def _prepare(self, need: int) -> None:
        try:
            for b in list(self.buffers):
                self._make(b, need)
                while not b.ready:
                    with self.guard:
                        b.ready = not b.capacity or b.populate(self._stop.is_set)
                    if self._stop.is_set():  # a save wants the guard
                        time.sleep(0.005)
        except (OSError, Damaged) as e:
            log.info("shared memory is not prepared: %s", e)

    def _spare(self, b: Buffer, newer_ones: int) -> bool:
        """Whether nobody misses what is in it: it is no save, or so many newer ones are there."""
        slots = self._slots()
        own = slots[self.buffers.index(b)]
        newer = [s for s in slots if s.complete and s.saved_ns > own.saved_ns]
        return not own.pending and not own.lent and (not own.complete or len(newer) >= newer_ones)

    def _make(self, b: Buffer, need: int) -> None:
        """Allocates a larger file for a buffer that nobody needs just now. The guard is not held for long."""
        with b.making:
            with self.guard:
                if b.capacity >= need or not self._spare(b, 2):
                    return
                seq = b.seq()
            fd = b.make(_rounded(need), seq)
            with self.guard:
                b.take(fd, _rounded(need))


def _rounded(need: int) -> int:
    """With a little room to grow, so that a longer pickle does not need a new file."""
    return -(-(need + need // 64) // _GRAIN) * _GRAIN


_pools: Dict[Tuple[int, str, int], Pool] = {}  # of this process: see Pool
def _tidy(pid: int, p: Pool) -> None:
    """Nobody else removes the memory of a job without a launcher. After an exception a new process may need it."""
    if os.getpid() == pid and getattr(sys, "last_value", None) is None:
        p.close()
        p.remove()


_pools_guard = threading.Lock()


def pool(runtime: str, local_rank: int, holders: int, keep: bool = True) -> Pool:
    """The process's pool of this local rank. Without keep its segments are removed when the process ends well."""
    key = (os.getpid(), runtime, local_rank)
    with _pools_guard:
        got = _pools.get(key)
        if got is None:
            got = _pools[key] = Pool(runtime, local_rank, holders, segment.free_bytes)
            if not keep:
                atexit.register(_tidy, os.getpid(), got)
        return got
