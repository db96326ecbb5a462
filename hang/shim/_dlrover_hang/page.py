"""The page of a worker: its layout, which page.Read in Go describes, and who gets it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import time
from typing import Mapping, Optional, Tuple

from . import process

SIZE = 4096
MAGIC = b"DLRHANG1"

# The words of a page, of 8 bytes each. A store into one is one aligned store of the processor.
PID, START, RANK, WORLD_SIZE, LOCAL, CREATED, HEARTBEAT, STEPS, LAST_STEP, PHASE, SPANS, THREAD, WANTED, BLOCKED = range(
    1, 15)
BEGUN, TIMED, STOP = 1 << 63, 1 << 62, 1  # in WANTED
GROUPS, GROUP_SLOTS = 16, 48
STEP_RING, STEP_SLOTS = 160, 192
SPAN_RING, SPAN_SLOTS = 352, 64
LOOKED, SUMS, SUM_SLOTS = 15, 480, 16  # the first slots of groups have sums

# The phases.
UNKNOWN, TRAIN, INIT, DATA, COMPILE, BUILD, EVAL, CHECKPOINT, END = range(9)


class Place:
    """Which page is this process's, by its environment."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Raises ValueError or KeyError: none."""
        self.dir = env["DLROVER_HANG_DIR"]
        self.rank, self.world_size, self.local = (int(env[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        if not (self.dir and 0 <= self.rank < self.world_size <= 1 << 20 and 0 <= self.local < self.world_size):
            raise ValueError("the ranks of the environment are none")

    @property
    def page(self) -> str:
        return os.path.join(self.dir, "l%d.page" % self.local)

    @property
    def timeline(self) -> str:
        return os.path.join(self.dir, "l%d.timeline" % self.local)

    @property
    def groups(self) -> str:
        return os.path.join(self.dir, "l%d.groups" % self.local)


class Taken(Exception):
    """Another process has the page."""


def claim(place: Place) -> mmap.mmap:
    """Makes the page, and returns it. Raises Taken, or OSError."""
    new = "%s.%d.new" % (place.page, os.getpid())
    page = _make(new, place)
    try:
        try:
            os.link(new, place.page)
        except FileExistsError:
            _displace(place, new)
    finally:
        os.unlink(new)
    return page


def _displace(place: Place, new: str) -> None:
    """Takes the place of a process that has ended, or that this one has started: the outermost of those that train is
    the worker. If another one is there it raises Taken."""
    dir = os.open(place.dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(dir, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who has it may be stopped: nobody waits
        try:
            owner = _owner(place.page)
            if owner is not None:
                _check_loss(*owner)
                os.unlink(place.page)
            os.link(new, place.page)
        finally:
            fcntl.flock(dir, fcntl.LOCK_UN)  # a fork of another thread may have a copy
    finally:
        os.close(dir)


def _check_loss(pid: int, start: int) -> None:
    """Raises Taken if a process may not lose its page to this one."""
    mine = os.getpid()
    if pid != mine and process.start(pid) == start != 0 and not process.descends(pid, mine):
        raise Taken


def _owner(path: str) -> Optional[Tuple[int, int]]:
    """The pid and the start of the process that has made a page, or None if there is no page."""
    try:
        with open(path, "rb") as f:
            b = f.read(SIZE)
    except FileNotFoundError:
        return None
    return struct.unpack_from("<QQ", b.ljust(SIZE, b"\0"), 8 * PID)


def _make(path: str, place: Place) -> mmap.mmap:
    """A complete page, in a file that is not the page yet. It is written, not just lengthened: where memory lacks that is
    an error, and no signal later."""
    pid, now = os.getpid(), time.monotonic_ns()
    head = struct.pack("<8s10Q", MAGIC, pid, process.start(pid), place.rank, place.world_size, place.local, now, now, 0,
                       0, now // 1000 << 8 | UNKNOWN)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.write(fd, head.ljust(SIZE, b"\0")) != SIZE:
            raise OSError(errno.ENOSPC, "no room for a page", path)
        return mmap.mmap(fd, SIZE)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
