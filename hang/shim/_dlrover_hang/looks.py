"""How early in its steps this process is at random moments, which tells who is waited for without comparing clocks.

A rank that takes longer than the others has begun few of a step's collectives for more of the time. Those that wait for
it have begun more of them.
"""

from __future__ import annotations

import os
from time import monotonic_ns
from typing import Any, List, Optional, Tuple

from .page import GROUPS, LOOKED, STEP_RING, STEP_SLOTS, STEPS, SUM_SLOTS, SUMS
from .groups import Groups

LEAST, SPREAD = 5 * 10**7, 10**8  # ns between two looks: at least, and up to so much more
_RECENT = 16  # steps that a step is compared with
_UNIT = 1 << 16  # of sums of positions, which are fractions of a step
_FULL = 1 << 6  # of sums of the share of looks with all collectives begun
_HALF = (1 << 32) - 1


class _Step:
    """A step that is being made, and the looks at it. Who changes a step for the next one has the old one alone."""

    __slots__ = ("began", "groups", "bases", "looks")

    def __init__(self, began: int, groups: Tuple[Tuple[int, Any], ...], bases: List[int]) -> None:
        self.began, self.groups, self.bases = began, groups, bases
        self.looks: List[Tuple[int, int, List[int]]] = []  # weight, weighted time since began, numbers of groups


class Looks:
    """The looks of one thread, and their sums in the page. step() is for the thread that trains."""

    def __init__(self, words: memoryview, groups: Groups) -> None:
        self._words = words
        self._groups = groups
        self._step: Optional[_Step] = None  # unless no look is due in it
        self._seed = monotonic_ns() ^ os.getpid() << 16
        self._due = 0
        self._began = monotonic_ns()  # the present step
        self._longest = 0  # ns of steps, less for those of long ago
        words[LOOKED] = SUM_SLOTS

    def wanted(self) -> bool:
        """Whether there is a group to look at."""
        return bool(self._groups.active)

    def pause(self, now: int) -> float:
        """Seconds until the next look. They are random, or the looks could fall in with the steps."""
        self._seed = (self._seed * 6364136223846793005 + 1442695040888963407) & (1 << 64) - 1
        pause = LEAST + (self._seed >> 33) % SPREAD
        self._due = now + pause
        return pause / 1e9

    def look(self, now: int) -> None:
        """Notes how far the process is. A look that is late stands for those that could not be: the process was stopped
        meanwhile, or somebody kept the interpreter's lock."""
        step = self._step
        if step is None or len(step.looks) >= 1024:
            return
        numbers = _numbers(step.groups)
        late = min(max(now - self._due, 0), now - step.began)
        weight = 1 + late // (LEAST + SPREAD // 2)
        if step is self._step and numbers:
            step.looks.append((weight, weight * (now - late // 2 - step.began), numbers))

    def step(self, now: int) -> None:
        """A step has ended. Most short steps see no look, and cost next to nothing."""
        step, took = self._step, now - self._began
        self._began = now
        longest = self._longest = max(took, self._longest - self._longest // 16)
        due = self._due <= now + 2 * longest
        looked = step is not None and bool(step.looks)
        if due or looked:
            active = self._groups.active
            numbers = _numbers(active)
            self._step = _Step(now, active, numbers) if due and numbers else None
            if looked and step.groups is active and numbers and self._usual(took):  # type: ignore[union-attr]
                self._add(step, took, numbers)  # type: ignore[arg-type]
        else:
            self._step = None

    def _usual(self, took: int) -> bool:
        """Whether a step that has just ended took about as long as others. An evaluation on one rank, a checkpoint or a
        compilation keeps all ranks waiting, and nobody is slow."""
        words = self._words
        n = words[STEPS]
        if n <= _RECENT:
            return False
        ends = [words[STEP_RING + i % STEP_SLOTS] for i in range(n - _RECENT - 1, n)]
        times = sorted(b - a for a, b in zip(ends, ends[1:]))
        return 2 * took <= 3 * times[_RECENT * 3 // 4]

    def _add(self, step: _Step, took: int, ends: List[int]) -> None:
        weight = sum(look[0] for look in step.looks)
        elapsed = sum(look[1] for look in step.looks) / (weight * max(took, 1))
        for i, (at, _) in enumerate(step.groups):
            total = ends[i] - step.bases[i]
            if total <= 0:
                continue
            counts = [(look[0], look[2][i] - step.bases[i]) for look in step.looks]
            # The time of the looks within the step is taken off: it is the same for all ranks but by chance.
            position = sum(w * k for w, k in counts) / (weight * total) - elapsed
            full = sum(w for w, k in counts if k >= total) / weight
            self._sum(SUMS + 2 * ((at - GROUPS) // 3), position, full)

    def _sum(self, at: int, position: float, full: float) -> None:
        words = self._words
        a, b = words[at], words[at + 1]
        position = min(max(position, -1.0), 1.0)
        steps, places = (a >> 32) + 1 & _HALF, a + round((1 + position) * _UNIT) & _HALF
        squares, fulls = (b >> 32) + round(position * position * _UNIT) & _HALF, b + round(full * _FULL) & 65535
        words[at], words[at + 1] = steps << 32 | places, squares << 32 | fulls


def _numbers(groups: Tuple[Tuple[int, Any], ...]) -> List[int]:
    """How many collectives each group has begun; none if one of the groups is gone, or does not count any more."""
    numbers = []
    try:
        for _, reference in groups:
            group = reference()
            if group is None:
                return []
            numbers.append(group._get_sequence_number_for_group())
    except RuntimeError:
        return []
    return numbers
