"""The segments of one worker: the choice of the one for the next save, and the allocation of their memory in advance.
"""

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
from .segment import Buffer, Damaged, Pending

log = logging.getLogger("dlrover.ckpt")

_SHARE = 0.6  # of the free memory, at most, for all buffers of a directory
_GRAIN = 2 << 20  # of a file: a huge page
_SMALL_GRAIN = 64 << 10  # of one that is smaller
_GLANCE = 0.01  # seconds that a save waits for a segment when none is free
_USUAL = 3  # buffers of a directory
_MOST = 12  # while saves that the disk wants wait for it
_LOOK = 0.005  # seconds between two looks whether the disk is done with a buffer
_CALM = 0.5  # seconds between two looks whether buffers can be given back
_ASK = 1.0  # seconds between two checks whether a buffer will be freed


class NoRoom(Exception):
    """Shared memory does not hold the save; the text says how much there is."""


class Slot(NamedTuple):
    """The inputs of the choice of a buffer."""

    number: int  # of the buffer in its set
    complete: bool
    saved_ns: int
    pending: bool  # the disk still wants it
    lent: bool  # views of a load need it
    durable: bool = False  # it is on disk


def choose(slots: Sequence[Slot], drop: bool) -> List[Tuple[int, bool]]:
    """The buffers of a directory that its next save may go to, the best first, and whether that loses something: the
    newest complete save or (with drop) one that waits for the disk. Locks are not known here."""
    newest = max((s for s in slots if s.complete), key=lambda s: s.saved_ns, default=None)

    def cost(s: Slot) -> Tuple[int, int]:
        if s.pending:
            return 4, s.saved_ns
        if s is newest:
            return 3, s.saved_ns
        return (2 if s.lent else 1 if s.complete else 0), s.saved_ns

    return [(s.number, cost(s)[0] > 2) for s in sorted(slots, key=cost) if drop or not s.pending]


def how_many(size: int, free: int) -> int:
    """Buffers of this size for this much free memory, 0 = not one."""
    for n in (3, 2):
        if n * size <= _SHARE * free:
            return n
    return 1 if size <= free else 0


class _Set:
    """The buffers of one checkpoint directory."""

    def __init__(self, dir: str) -> None:
        self.dir = dir
        self.buffers: List[Buffer] = []
        self.size = 0  # bytes that they were made for; 0: to be checked again
        self.used = False  # by this process

    @property
    def capacity(self) -> int:
        return sum(b.capacity for b in self.buffers)


class Pool:
    """The segment files seg/l<local_rank>-<k>.seg, a set for each checkpoint directory. Made once in a process: a second
    descriptor of a file would drop the first one's lock when it is closed."""

    def __init__(self, runtime: str, local_rank: int, holders: int, free: Callable[[str], int]) -> None:
        self._seg = os.path.join(runtime, "seg")
        self._local_rank = local_rank
        self._holders = max(1, holders)  # workers on this node that share the memory
        self._free = free
        # Over the buffers: held by a save, by a reader, and for a moment at a time by the preparation.
        self.guard = threading.RLock()
        self._stop = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._slimming: Optional[threading.Thread] = None
        self._closed = threading.Event()
        self._sets: Dict[str, _Set] = {}
        self._idle: List[Buffer] = []  # without a save that is still needed: for any directory
        self.waited = 0.0  # seconds that the last acquire() has waited for the disk
        self.displaced: Optional[Pending] = None  # the buffer that the last acquire() lost: its file was too small
        self._next = 0  # numbers are not used again: a name that was removed never means another save
        self._adopt()

    def _adopt(self) -> None:
        """Takes over the segments of an earlier process with this local rank."""
        prefix = "l%d-" % self._local_rank
        numbers: List[int] = []
        for name in os.listdir(self._seg):
            k, dot, ext = name[len(prefix):].partition(".")
            if name.startswith(prefix) and k.isdigit() and ext == "seg":
                numbers.append(int(k))
            elif name.startswith(prefix) and k.isdigit() and ext == "seg.new":
                _unlink(os.path.join(self._seg, name))  # of a process that was killed while it made it
        for number in sorted(numbers):
            b = Buffer(self._path(number))
            dir = ""
            try:
                if not b.open():
                    continue
                meta = segment.read_save(b.fd)[1]
                dir = str(meta.get("dir") or "") if meta else ""
            except (OSError, Damaged, ValueError) as e:
                log.warning("segment %s is removed: %s", b.path, e)
                b.close()
                _unlink(b.path)
                continue
            (self._set(dir).buffers if dir else self._idle).append(b)
        self._next = max(numbers, default=-1) + 1
        for s in self._sets.values():
            if len(s.buffers) >= _USUAL:  # else there may be room for more by now
                s.size = min(b.capacity for b in s.buffers)
        self._after_burst()

    def _set(self, dir: str) -> _Set:
        if dir not in self._sets:
            self._sets[dir] = _Set(dir)
        return self._sets[dir]

    def use(self, dir: str) -> _Set:
        """The buffers of a directory that this process saves to."""
        s = self._set(dir)
        s.used = True
        return s

    def _path(self, k: int) -> str:
        return os.path.join(self._seg, "l%d-%d.seg" % (self._local_rank, k))

    @property
    def buffers(self) -> List[Buffer]:
        return [b for s in self._sets.values() for b in s.buffers] + self._idle

    def by_name(self, name: str) -> Optional[Buffer]:
        return next((b for b in self.buffers if b.fd >= 0 and os.path.basename(b.path) == os.path.basename(name)), None)

    def renew(self, dir: str) -> bool:
        """Prepares buffers that are as large as the largest that an earlier process has left. False: it has left none."""
        most = max((b.capacity for b in self._set(dir).buffers), default=0)
        if most:
            self.prepare(most * 64 // 65, dir)  # see _rounded: they must not grow with every process
        return most > 0

    def acquire(self, need: int, disk: bool, dir: str = "", drop: bool = False, patience: float = 0.0,
                served: Callable[[], bool] = lambda: True) -> Optional[Buffer]:
        """A buffer of at least `need` bytes, locked; None: all are in use. NoRoom: there is no memory for it.
        To be given back with release().

        drop      a save that goes to disk may take the place of an older one that still waits for the disk. It is in
                  the buffer until the caller overwrites it, or else in `displaced`
        patience  else it waits so many seconds for the disk to be done with one, as long as served() returns
                  True: a daemon writes them
        """
        self.waited, self.displaced, begin = 0.0, None, time.monotonic()
        ask = begin + _GLANCE
        pause = _GLANCE / 10  # a reader may hold a lock for a moment
        while True:
            self.hold()
            full = False
            try:
                s = self.use(dir)
                b, making = self._find(s, need, disk and drop)
                if b is None:
                    full = disk and not drop and any(x.pending for x in self._slots(s))
            except BaseException:
                self.guard.release()
                raise
            if b is not None:
                return b
            self.guard.release()
            if making is not None:
                with making.making:  # its memory is being allocated: nothing may be lost meanwhile
                    continue
            now = time.monotonic()
            if now >= begin + (patience if full else _GLANCE):
                return None
            if now >= ask:
                if not served():
                    return None
                ask = now + _ASK
                pause = _LOOK
            time.sleep(pause)
            if full:
                self.waited = time.monotonic() - begin

    def hold(self) -> None:
        """Takes the guard from the preparation, which lets go of it soon."""
        self._stop.set()
        self.guard.acquire()
        self._stop.clear()

    def _find(self, s: _Set, need: int, drop: bool) -> Tuple[Optional[Buffer], Optional[Buffer]]:
        """A locked buffer, or one to wait for."""
        self._fit(s, need)
        making = next((b for b in s.buffers if b.making.locked()), None)
        for k, loses in choose(self._slots(s), drop):
            b = s.buffers[k]
            if loses and not drop and not making and self._more(s, need):
                b = s.buffers[-1]
            if not b.making.locked() and not (loses and making) and self._take(s, b, need):
                return b, None
        if not making and self._more(s, need) and self._take(s, s.buffers[-1], need):
            return s.buffers[-1], None
        return None, making

    def release(self, b: Buffer) -> None:
        segment.unlock(b.fd)
        self.guard.release()

    def _take(self, s: _Set, b: Buffer, need: int) -> bool:
        if b.fd >= 0 and not segment.lock(b.fd, True):
            return False
        if b.capacity >= need and b.lent() and not b.detach():
            segment.unlock(b.fd)
            return False
        if b.capacity < need:
            self._grow(s, b, need)
            if not segment.lock(b.fd, True):
                return False
        return True

    def _grow(self, s: _Set, b: Buffer, need: int) -> None:
        """A new file in the place of the old one; views of a load keep the old one."""
        try:
            size = _rounded(max(need, s.size))
            fd = b.make(size, b.seq())
            self.displaced = b.pending()
            if self.displaced is not None:
                b.discard()  # the daemon may have the old file open, and would still commit it
            b.take(fd, size)
        except OSError as e:
            if b.fd >= 0:
                segment.unlock(b.fd)
            if e.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise NoRoom("shared memory is full: %d bytes for a save were refused; %s"
                         % (need, segment.remedy(self._seg))) from e

    def _slots(self, s: _Set) -> List[Slot]:
        out = []
        for k, b in enumerate(s.buffers):
            try:
                h = b.header() if b.fd >= 0 else None
            except Damaged:
                h = None
            if h is None:
                out.append(Slot(k, False, 0, False, b.lent()))
            else:
                out.append(Slot(k, h.state == segment.COMPLETE, h.saved_ns, h.pending, b.lent(), h.durable >= h.seq))
        return out

    # -----------------------------------------------------------------------------------------------------------------
    # Room
    # -----------------------------------------------------------------------------------------------------------------

    def _room(self, s: _Set) -> int:
        """Bytes that the buffers of a directory may have."""
        return self._free(self._seg) // self._holders + s.capacity + sum(b.capacity for b in self._idle)

    def _fit(self, s: _Set, need: int) -> None:
        """As many buffers as the memory allows for saves of this size."""
        if need <= s.size and s.buffers:
            return
        size = _rounded(need)
        n = how_many(size, self._room(s))
        for keep, enough in ((2, 2), (1, 1), (0, 1)):
            if n < enough and self._spared(s, keep):
                n = how_many(size, self._room(s))
        if n == 0:
            raise NoRoom("a save of %d bytes does not fit into shared memory: %d bytes are free for each worker%s; %s"
                         % (need, self._free(self._seg) // self._holders, self._others(s), segment.remedy(self._seg)))
        if n == 1:
            log.warning("shared memory has room for one save of %s only, of %d bytes: the newest is lost while the next is "
                        "written%s; %s", s.dir or "this size", need, self._others(s), segment.remedy(self._seg))
        while len(s.buffers) < n:
            self._add(s, size)
        _remove(self._slim(s, n, 1) + self._idle)  # these were counted as room
        self._idle.clear()
        s.size = need

    def _add(self, s: _Set, size: int) -> None:
        """One more buffer, from the unused ones if one is large enough."""
        b = next((b for b in self._idle if b.capacity >= size), None)
        if b is None:
            b = Buffer(self._path(self._next))
            self._next += 1
        else:
            self._idle.remove(b)
        s.buffers.append(b)

    def _others(self, s: _Set) -> str:
        held = ["%s: %d" % (o.dir, o.capacity) for o in self._sets.values() if o is not s and o.capacity]
        return ", other checkpoint directories hold %s" % ", ".join(held) if held else ""

    def _spared(self, s: _Set, keep: int) -> bool:
        """Takes from the other directories the saves older than their newest `keep`. The second is needed when not
        every rank has the newest. The newest is taken (keep = 0) only if it is on disk, and its directory belongs to an
        earlier process and is not used by this one. Returns whether any was taken."""
        out = []
        for o in self._sets.values():
            if o is s or keep == 0 and (o.used or not all(x.durable for x in self._slots(o) if x.complete)):
                continue
            taken = self._slim(o, keep, keep)
            if taken:
                o.size = 0  # it may have more again when there is room
            out += taken
        _remove(out)
        return bool(out)

    def _slim(self, s: _Set, most: int, newer_ones: int) -> List[Buffer]:
        """Takes unneeded buffers from a set, the oldest first, until it has `most`."""
        order = [s.buffers[x.number] for x in sorted(self._slots(s), key=lambda x: (x.complete, x.saved_ns))]
        out = []
        for b in order:
            if len(s.buffers) > most and not b.making.locked() and self._spare(s, b, newer_ones):
                s.buffers.remove(b)
                out.append(b)
        return out

    def _more(self, s: _Set, need: int) -> bool:
        """One more buffer while saves wait for the disk, if there is room."""
        if len(s.buffers) < _USUAL or len(s.buffers) >= _MOST or not any(x.pending for x in self._slots(s)):
            return False
        size = _rounded(max(need, s.size))
        if (len(s.buffers) + 1) * size > _SHARE * self._room(s):
            return False
        self._add(s, size)
        try:
            if not s.buffers[-1].capacity:
                self._grow(s, s.buffers[-1], need)
        except (NoRoom, OSError):
            s.buffers.pop()
            return False
        s.buffers[-1].ready = True  # its pages come with the save
        self._after_burst()
        return True

    def _after_burst(self) -> None:
        if self._slimming is None and any(len(s.buffers) > _USUAL for s in self._sets.values()):
            self._slimming = threading.Thread(target=self._give_back, name="dlrover-ckpt-give-back", daemon=True)
            self._slimming.start()

    def _give_back(self) -> None:
        """Removes the buffers that a burst of saves has made, when the disk is done with it."""
        while not self._closed.wait(_CALM):
            out: List[Buffer] = []
            with self.guard:
                large = [s for s in self._sets.values() if len(s.buffers) > _USUAL]
                for s in large:
                    if not any(x.pending for x in self._slots(s)):
                        out += self._slim(s, _USUAL, 2)
                over = all(len(s.buffers) <= _USUAL for s in large)
                if over:
                    self._slimming = None
            _remove(out)  # without the guard: it takes a while
            if over:
                return

    # -----------------------------------------------------------------------------------------------------------------
    # Preparation
    # -----------------------------------------------------------------------------------------------------------------

    def prepare(self, need: int, dir: str = "") -> None:
        """Makes buffers of `need` bytes and faults them in, in the background. Does nothing while it is at it."""
        with self.guard:
            s = self.use(dir)
            done = bool(s.buffers) and need <= s.size and all(b.ready for b in s.buffers)
            if done or self._closed.is_set() or (self._thread is not None and self._thread.is_alive()):
                return
            try:
                self._fit(s, need)
            except NoRoom as e:
                log.info("%s", e)
                return
            self._thread = threading.Thread(target=self._prepare, args=(s, need), name="dlrover-ckpt-prepare",
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
            self._closed.set()
            t = self._slimming
        self.prepared()
        if t is not None:
            t.join()
        for b in self.buffers:
            b.close()

    def remove(self) -> None:
        """Removes the segments, and the directory if it was the last that used it. Follows close()."""
        for b in self.buffers:
            _unlink(b.path)
        for d in (self._seg, os.path.dirname(self._seg)):
            try:
                os.rmdir(d)
            except OSError:
                return  # others use it

    def _prepare(self, s: _Set, need: int) -> None:
        try:
            for b in list(s.buffers):
                self._make(s, b, need)
                while not b.ready:
                    with self.guard:
                        b.ready = not b.capacity or b.populate(self._stop.is_set)
                    if self._stop.is_set():  # a save wants the guard
                        time.sleep(0.005)
        except (OSError, Damaged) as e:
            log.info("shared memory is not prepared: %s", e)

    def _spare(self, s: _Set, b: Buffer, newer_ones: int) -> bool:
        """Whether its content is not needed: it is not a save, or so many newer ones are there."""
        slots = self._slots(s)
        own = slots[s.buffers.index(b)]
        newer = [x for x in slots if x.complete and x.saved_ns > own.saved_ns]
        return not own.pending and not own.lent and (not own.complete or len(newer) >= newer_ones)

    def _make(self, s: _Set, b: Buffer, need: int) -> None:
        """Allocates a larger file for an idle buffer. The guard is not held for long."""
        with self.guard:  # first: a save that looks for a buffer must not see b.making change
            if b not in s.buffers or b.capacity >= need or not self._spare(s, b, 2):
                return
            seq = b.seq()
            b.making.acquire()
        try:
            fd = b.make(_rounded(need), seq)
            with self.guard:
                b.take(fd, _rounded(need))
        finally:
            b.making.release()


def _remove(buffers: Sequence[Buffer]) -> None:
    for b in buffers:
        b.remove()


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # there was none


def _rounded(need: int) -> int:
    """With a little room to grow, so that a longer pickle does not need a new file."""
    size = need + need // 64
    grain = _GRAIN if size >= _GRAIN else _SMALL_GRAIN
    return -(-size // grain) * grain


_pools: Dict[Tuple[int, str, int], Pool] = {}  # of this process: see Pool
_pools_guard = threading.Lock()


def _tidy(pid: int, p: Pool) -> None:
    """Nothing else removes the memory of a job without a launcher. After an exception a new process may need it."""
    if os.getpid() == pid and getattr(sys, "last_value", None) is None:
        p.close()
        p.remove()


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
