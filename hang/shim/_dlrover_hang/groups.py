"""What the process groups of torch.distributed do."""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

from .page import GROUP_SLOTS, GROUPS, SUM_SLOTS, SUMS, Place

_IDLE = 60 * 10**9  # ns without a collective, after which a group gives its slot to one that needs it
_TEXT = 200  # characters of a name


class _Group:
    """A process group as this process, a member, knows it. It does not keep the group alive."""

    def __init__(self, group: Any, name: str, ranks: str, generation: int, backend: str) -> None:
        self.ref = weakref.ref(group)
        self.generation = generation
        self.several = len(_backends(group)) > 1
        self.slot: Optional[int] = None
        self.seq, self.since = self.read(group), 0
        self.about = {
            "id": _id("%d\0%s\0%s" % (generation, name, ranks)),
            "name": name[:_TEXT],
            "desc": str(getattr(group, "group_desc", ""))[:_TEXT],
            "backend": backend[:_TEXT],
            "ranks": ranks,
        }

    def read(self, group: Any) -> int:
        """How many collectives it has begun, counted from anywhere. Groups with several backends count in each."""
        if self.several:
            return sum(b._get_sequence_number_for_group() for b in _backends(group)) & (1 << 64) - 1
        return int(group._get_sequence_number_for_group())


class Groups:
    """The slots of the page that tell of groups, and the file that says what they are.

    publish() belongs to one thread; hot is for all."""

    def __init__(self, words: memoryview, place: Place) -> None:
        self.hot: Tuple[Tuple[int, Any], ...] = ()  # the words and references of groups that are quickly read
        self.active: Tuple[Tuple[int, Any], ...] = ()  # those among them that have sums, and collectives of late
        self._words = words
        self._place = place
        self._groups: Dict[str, _Group] = {}  # by their names
        self._free = list(range(GROUP_SLOTS - 1, -1, -1))
        self._emptied: List[int] = []  # slots that are free from the next time on
        self._listed: List[Any] = []  # what the file says

    def publish(self, generation: int, now: int) -> None:
        """generation: how many worlds there have been; groups of different ones may have the same name."""
        self._free.extend(self._emptied)
        self._emptied = []
        present = {name: group for group, name in self._present()}
        for name in [n for n, g in self._groups.items() if n not in present or g.ref() is not present[n]]:
            self._empty(self._groups.pop(name))
        for name, group in present.items():
            if name not in self._groups:
                self._add(name, group, generation)
        for known in list(self._groups.values()):
            self._look(known, now)
        self._place_groups(now)
        used = {GROUPS + 3 * (g.slot or 0) for g in self._groups.values() if now - g.since < _IDLE}
        active = tuple(h for h in self.hot if h[0] < GROUPS + 3 * SUM_SLOTS and h[0] in used)
        if active != self.active:
            self.active = active

    def backends(self) -> List[str]:
        return [str(g.about["backend"]) for g in self._groups.values()]

    def _present(self) -> Iterator[Tuple[Any, str]]:
        """The groups that are complete, if they are those of the launcher's world."""
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        default = c10d and c10d.GroupMember.WORLD
        ranks = _state(c10d, "pg_group_ranks") if default is not None else {}
        if default not in ranks or len(ranks[default]) != self._place.world_size or default.rank() != self._place.rank:
            return
        names = _state(c10d, "pg_names")
        for group in list(_state(c10d, "pg_map")):
            # Groups that are made of Python may do anything when they are asked.
            if group in names and group in ranks and type(group).__module__.startswith("torch."):
                yield group, str(names[group])

    def _add(self, name: str, group: Any, generation: int) -> None:
        c10d = sys.modules["torch.distributed.distributed_c10d"]
        backend = _state(c10d, "pg_backend_config").get(group) or _state(c10d, "pg_map")[group][0]
        try:
            self._groups[name] = _Group(group, name, _ranges(_state(c10d, "pg_group_ranks")[group]), generation,
                                        str(backend))
        except RuntimeError:
            pass  # not set yet, or the backend does not count

    def _look(self, known: _Group, now: int) -> None:
        group = known.ref()
        seq = known.seq if group is None else known.read(group)
        if seq != known.seq or not known.since:
            known.seq, known.since = seq, now
        if known.slot is not None:
            at = GROUPS + 3 * known.slot
            if self._words[at + 1] != seq:
                self._words[at + 1], self._words[at + 2] = seq, now

    def _place_groups(self, now: int) -> None:
        """Gives slots to groups that have none, those first that do something."""
        waiting = sorted((g for g in self._groups.values() if g.slot is None), key=lambda g: -g.since)
        new = waiting[:len(self._free)]
        for group in new:
            group.slot = self._free.pop()
        if new or self._emptied:
            self._publish_slots(new)
        placed = [g for g in self._groups.values() if g.slot is not None]
        if len(waiting) > len(new) and not self._free and waiting[len(new)].since == now:
            oldest = min(placed, key=lambda g: g.since)
            if now - oldest.since > _IDLE:
                self._empty(oldest)

    def _publish_slots(self, new: Iterable[_Group]) -> None:
        placed = [g for g in self._groups.values() if g.slot is not None]
        self._write([g.about for g in placed])
        for group in new:
            at, slot = GROUPS + 3 * (group.slot or 0), group.slot or 0
            self._words[at + 1], self._words[at + 2] = group.seq, group.since
            if slot < SUM_SLOTS:
                self._words[SUMS + 2 * slot] = self._words[SUMS + 2 * slot + 1] = 0
            self._words[at] = group.about["id"]
        self.hot = tuple((GROUPS + 3 * (g.slot or 0), g.ref) for g in placed if not g.several)

    def _empty(self, group: _Group) -> None:
        slot, group.slot = group.slot, None
        if slot is not None:
            self.hot = tuple(h for h in self.hot if h[0] != GROUPS + 3 * slot)
            self._words[GROUPS + 3 * slot] = 0
            self._emptied.append(slot)

    def _write(self, groups: List[Any]) -> None:
        """Replaces the file. Where that cannot be done the page's numbers stay without names."""
        import json

        new = "%s.%d.new" % (self._place.groups, os.getpid())
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(fd, "w") as f:
                    json.dump(groups, f)
                os.replace(new, self._place.groups)
            except BaseException:
                os.unlink(new)
                raise
        except OSError:
            pass


def _state(c10d: Any, name: str) -> Any:
    """One of the tables of torch.distributed, by group; 1.x has fewer, and has them elsewhere."""
    return getattr(c10d._world, name) if hasattr(c10d, "_world") else getattr(c10d, "_" + name, {})


def _backends(group: Any) -> List[Any]:
    """What does a group's work, by device; of 1.x the group itself."""
    try:
        found = [group._get_backend(d) for d in group._device_types]
    except (AttributeError, RuntimeError):
        return [group]
    return list({id(b): b for b in found}.values()) or [group]


def _ranges(ranks: Iterable[int]) -> str:
    """Ranks as text: 0-3,8."""
    out: List[List[int]] = []
    for r in sorted(ranks):
        if out and r == out[-1][1] + 1:
            out[-1][1] = r
        else:
            out.append([r, r])
    return ",".join("%d" % a if a == b else "%d-%d" % (a, b) for a, b in out)


def _id(text: str) -> int:
    import hashlib

    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") or 1
