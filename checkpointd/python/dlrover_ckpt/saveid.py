"""The identity of a save: its id, its time and its place in the order of a directory."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Dict, Iterable, NamedTuple, Tuple

from .ranks import RankInfo

_REMEMBERED = 1000  # steps


class SaveID(NamedTuple):
    id: str  # the same on all ranks
    begun_ns: int  # later than that of every save that this process knows of in the directory
    order: int  # of the saves of this process and epoch into the directory, from 1


class StepCounts:
    """The number of saves of each step: part of the save's id. For steps that were saved long ago only the maximum is
    kept, so that a step that is saved again gets a new id."""

    def __init__(self) -> None:
        self._counts: Dict[int, int] = {}
        self._forgotten = -1  # the highest such step
        self._most = 0  # how often one of them was saved

    def next(self, step: int) -> int:
        n = self._counts.pop(step, self._most if step <= self._forgotten else 0) + 1
        self._counts[step] = n
        if len(self._counts) > _REMEMBERED:
            old = next(iter(self._counts))
            self._forgotten, self._most = max(self._forgotten, old), max(self._most, self._counts.pop(old))
        return n


# By process number, because a child that was forked has copies of them.
_counts: Dict[Tuple[int, str], StepCounts] = {}  # of each epoch
_orders: Dict[Tuple[int, str, str], int] = {}  # saves of each epoch into a directory
_latest: Dict[Tuple[int, str], int] = {}  # when the latest save was made that is known of a directory


def new_save(info: RankInfo, incarnation: str, dir: str, step: int) -> SaveID:
    """The id of the next save. All ranks that save the same steps in the same order get the same one."""
    pid = os.getpid()
    count = _counts.setdefault((pid, info.epoch), StepCounts()).next(step)
    text = "%s|%s%s|%d|%d" % (info.run, info.epoch, incarnation, step, count)
    order = _orders.get((pid, info.epoch, dir), 0) + 1
    _orders[pid, info.epoch, dir] = order
    begun = max(time.time_ns(), _latest.get((pid, dir), 0) + 1)  # the clock may have been another node's
    return SaveID(hashlib.sha256(text.encode()).hexdigest()[:16], begun, order)


def note_times(dir: str, saved_ns: Iterable[int]) -> None:
    """Later saves to a directory are ordered after these, regardless of the clock."""
    key = os.getpid(), dir
    _latest[key] = max([_latest.get(key, 0), *saved_ns])
