"""The shards of a dataset, and their order: pure arithmetic, with the same result on every rank."""

from __future__ import annotations

import json
import random
from typing import Any, Callable, List, NamedTuple, Optional, Union

_MASK = (1 << 64) - 1


class Shard(NamedTuple):
    """Records start to end - 1; or those whose numbers are in more; or, if that is an epoch, those at start to end - 1
    in the order of that epoch."""

    start: int
    end: int
    more: Union[None, int, List[int]] = None


class Order:
    """A random permutation of 0 to size - 1 that can be read at any place, in constant memory."""

    def __init__(self, seed: str, size: int) -> None:
        self._size = size
        self._half = max((max(size - 1, 1).bit_length() + 1) // 2, 1)
        r = random.Random(seed)  # the same in every Python
        self._keys = [r.getrandbits(64) for _ in range(4)]

    def __getitem__(self, place: int) -> int:
        place = self._mix(place)
        while place >= self._size:  # the cipher is one of a power of 4, less than four times as many
            place = self._mix(place)
        return place

    def _mix(self, x: int) -> int:
        low = (1 << self._half) - 1
        left, right = x >> self._half, x & low
        for key in self._keys:
            y = (right + key) * 0x9E3779B97F4A7C15 & _MASK
            y = (y ^ y >> 29) * 0xBF58476D1CE4E5B9 & _MASK
            left, right = right, left ^ (y >> 32 & low)
        return left << self._half | right


class Dataset(NamedTuple):
    """A script's settings of a dataset."""

    name: str
    size: int  # records
    shard: int  # records of each, but the last one
    epochs: int  # 0 or less: no end
    shuffle: bool
    text: bool  # shuffle the records, and not only the shards

    def count(self, shard: int) -> int:
        """The shards of an epoch."""
        return -(-self.size // shard)

    def at(self, epoch: int, number: int, shard: int) -> Shard:
        if self.shuffle and not self.text:
            number = self.order(epoch, self.count(shard))[number]
        start = number * shard
        return Shard(start, min(start + shard, self.size), epoch if self.shuffle and self.text else None)

    def order(self, epoch: int, size: int) -> Order:
        return Order("%s %d" % (self.name, epoch), size)

    def indices(self, shard: Shard) -> List[int]:
        """The records of a shard one by one; empty: they are in their own order."""
        if isinstance(shard.more, int):
            order = self.order(shard.more, self.size)
            return [order[i] for i in range(shard.start, shard.end)]
        return shard.more or []


class Plan:
    """Shards in the order in which they are handed out: some that are left over, then the rest of an epoch, from number
    `next` on with shards of `shard` records, then all later epochs."""

    def __init__(self, data: Dataset, left: List[Shard], epoch: int = 0, next: int = 0, shard: int = 0) -> None:
        self.data, self.left, self.epoch, self.next, self.shard = data, left, epoch, next, shard or data.shard

    def _later(self, n: int) -> Optional[List[int]]:
        """Epoch, number and records of the n-th shard after those that are left over; None: there are not so many."""
        rest = self.data.count(self.shard) - self.next
        if n < rest:
            return [self.epoch, self.next + n, self.shard] if self._has(self.epoch) else None
        count = self.data.count(self.data.shard)
        epoch, number = divmod(n - rest, count) if count else (0, 0)
        epoch += self.epoch + 1
        return [epoch, number, self.data.shard] if count and self._has(epoch) else None

    def _has(self, epoch: int) -> bool:
        return self.data.epochs <= 0 or epoch < self.data.epochs

    def at(self, n: int) -> Optional[Shard]:
        """The n-th shard; None: there are not so many."""
        if n < len(self.left):
            return self.left[n]
        later = self._later(n - len(self.left))
        return self.data.at(*later) if later else None

    def total(self) -> Optional[int]:
        """None: without end, unless the dataset is empty."""
        if self.data.size == 0:
            return len(self.left)
        if self.data.epochs <= 0:
            return None
        rest = self.data.count(self.shard) - self.next if self._has(self.epoch) else 0
        return len(self.left) + rest + max(self.data.epochs - self.epoch - 1, 0) * self.data.count(self.data.shard)

    def after(self, handed: int, done: Callable[[int], bool]) -> "Plan":
        """The rest of a plan after so many shards were handed out. Those that are not done are first."""
        total = self.total()
        handed = handed if total is None else min(handed, total)
        undone = [s for s in (self.at(n) for n in range(handed) if not done(n)) if s]
        beyond = handed - len(self.left)
        if beyond <= 0:
            return Plan(self.data, undone + self.left[handed:], self.epoch, self.next, self.shard)
        later = self._later(beyond) or [max(self.data.epochs, self.epoch), 0, self.data.shard]
        return Plan(self.data, undone, *later)

    def dump(self) -> str:
        """As DLRover has it, where the rest of the epoch is listed in todo."""
        return json.dumps({"dataset_name": self.data.name, "todo": [], "doing": [_row(s) for s in self.left],
                           "epoch": self.epoch, "next": self.next, "shard_size": self.shard, "splitter": None,
                           "dataset_size": self.data.size, "shuffle": self.data.shuffle, "text": self.data.text})

    @classmethod
    def load(cls, data: Dataset, text: Union[str, bytes]) -> "Plan":
        """The other way round. Also reads what DLRover's master has written: epoch is then the one after todo."""
        try:
            state = json.loads(text)
            name, left = state["dataset_name"], [_shard(row, data) for row in state["doing"] + state["todo"]]
            plan = cls(data, left, _number(state["epoch"]), _number(state.get("next", 0)),
                       _number(state.get("shard_size", 0)))
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as e:
            raise ValueError("this is not a checkpoint of shards of %d records: %s" % (data.size, e)) from None
        for what, now, then in (("dataset_name", data.name, name),
                                ("dataset_size", data.size, state.get("dataset_size", data.size)),
                                ("shuffle", data.shuffle, state.get("shuffle", data.shuffle)),
                                ('storage_type == "text"', data.text, state.get("text", data.text))):
            if now != then:
                raise ValueError("%s is %r, and was %r where these shards come from: leave it as it was" %
                                 (what, now, then))
        if plan.next > data.count(plan.shard):
            raise ValueError("shard %d of an epoch of %d records in shards of %d: is this another dataset?"
                             % (plan.next, data.size, plan.shard))
        return plan


def _row(s: Shard) -> List[Any]:
    return [s.start, s.end] if s.more is None else [s.start, s.end, s.more]


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise ValueError("%r is not a number from 0 on" % (value,))
    return value


def _shard(row: Any, data: Dataset) -> Shard:
    start, end = _number(row[0]), _number(row[1])
    more = row[2] if len(row) > 2 else None
    if isinstance(more, list):
        more = [_number(i) for i in more]
        fits = end - start == len(more) and max(more, default=0) < data.size
    else:
        fits = more is None or _number(more) >= 0
    if not (start < end <= data.size and fits):
        raise ValueError("a shard from %d to %d" % (start, end))
    return Shard(start, end, more)
