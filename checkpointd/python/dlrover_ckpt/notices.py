"""Log lines of an engine: not too often, and none twice."""

from __future__ import annotations

import logging
import time
from typing import Any, Dict, Iterable, Set, Tuple

from .segment import Pending

log = logging.getLogger("dlrover.ckpt")

_WAIT_LINES = 10.0  # seconds between two lines about saves that waited for the disk
_REMEMBERED = 1000  # saves


class Once:
    """Warnings that are given once in a process, or once for each `about`."""

    def __init__(self) -> None:
        self._given: Set[Tuple[str, str]] = set()

    def warn(self, text: str, *args: Any, about: str = "") -> None:
        if (text, about) not in self._given:
            self._given.add((text, about))
            log.warning(text, *args)


class Waits:
    """How long saves have waited for the disk. There is a line about the first, and then now and then."""

    def __init__(self) -> None:
        self._number, self._seconds = 0, 0.0
        self._said = -_WAIT_LINES

    def add(self, step: int, seconds: float) -> None:
        self._number += 1
        self._seconds += seconds
        now = time.monotonic()
        if now - self._said >= _WAIT_LINES:
            self._said = now
            log.warning("step %d waited %.3f s for the disk, because shared memory is full of DISK saves (%d saves "
                        "have waited %.3f s so far): save less often, or with drop_superseded=True", step, seconds,
                        self._number, self._seconds)


class Stopwatch:
    """Runs while any of some calls does."""

    def __init__(self) -> None:
        self._ns = self._began = self._running = 0

    def ns(self) -> int:
        return self._ns + (time.monotonic_ns() - self._began if self._running else 0)

    def __enter__(self) -> None:
        if not self._running:
            self._began = time.monotonic_ns()
        self._running += 1

    def __exit__(self, *_: Any) -> None:
        self._ns = self.ns() if self._running == 1 else self._ns
        self._running -= 1


class Dropped:
    """Logs the saves that newer ones replace: each once in a job, though every rank may drop its shard of it, and not
    all at the same time."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._named: Dict[str, None] = {}  # ids, the newest last

    def name(self, dropped: Iterable[Tuple[int, Pending]], step: int) -> None:
        """dropped: the dropped saves by rank; the same on all ranks that agree on saves."""
        for rank, lost in dropped:
            if lost.save in self._named:
                continue
            self._named[lost.save] = None
            if len(self._named) > _REMEMBERED:
                del self._named[next(iter(self._named))]
            if rank == self._rank:
                log.warning("step %d is dropped before it was on disk: step %d takes its place, and drop_superseded is "
                            "set", lost.step, step)
