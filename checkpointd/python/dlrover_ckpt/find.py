"""The choice of the save to load: every rank makes the same one, from the data of all ranks."""

from __future__ import annotations

from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

_NODES = 8  # that are named
_SLACK_NS = 5 * 10**9  # the tracker is written right after the manifest


class Offer(NamedTuple):
    """A complete save in memory that this rank could load."""

    save: str
    step: int
    saved_ns: int
    world_size: int
    resize: str
    seg: str  # file name below the runtime directory


class Commit(NamedTuple):
    """A committed save on disk, as one rank sees it."""

    step: int
    save: str
    committed_ns: int
    saved_ns: int
    shards: int = 1
    world_size: int = 1


class Disk(NamedTuple):
    """The saves that one rank sees on disk."""

    commits: List[Commit]
    tracked: Optional[int]
    moved_ns: int  # time at which the tracker was set by hand, 0 = it was not


def newest_in_memory(ranks: Sequence[Sequence[Offer]], world_size: int) -> Optional[Tuple[str, int, int]]:
    """(save, step, when) of the newest save that every rank can load."""
    common = set.intersection(*({o.save for o in offers} for offers in ranks)) if ranks else set()
    best: Optional[Tuple[str, int, int]] = None
    for save in sorted(common):
        same = [o for offers in ranks for o in offers if o.save == save]
        if any(o.resize != "any" and o.world_size != world_size for o in same):
            continue
        when = max(o.saved_ns for o in same)
        if best is None or (when, same[0].step) > (best[2], best[1]):
            best = (save, same[0].step, when)
    return best


def on_disk(ranks: Sequence[Disk]) -> List[Commit]:
    """The commits that every rank sees, in the order in which they are tried: a step that was set in the tracker by
    hand and older ones, else the newest first."""
    common = set.intersection(*({(c.step, c.save) for c in d.commits} for d in ranks)) if ranks else set()
    out = [c for c in ranks[0].commits if (c.step, c.save) in common]
    out.sort(key=lambda c: (-c.committed_ns, -c.saved_ns, -c.step))
    named = [c for c in out if c.step == ranks[0].tracked]
    if named and ranks[0].moved_ns:
        older = out[out.index(named[0]) + 1:]
        return named + older
    return out


def unseen(ranks: Sequence[Disk], nodes: Sequence[int]) -> str:
    """Which nodes see which commits, when they see different ones; "" = they all see the same, or none."""
    seen: Dict[int, Set[Tuple[int, str]]] = {}
    for node, disk in zip(nodes, ranks):
        seen.setdefault(node, set()).update((c.step, c.save) for c in disk.commits)
    if all(s == seen[nodes[0]] for s in seen.values()):
        return ""
    return ", ".join("node %d sees %s" % (n, _steps(step for step, _ in seen[n])) for n in sorted(seen)[:_NODES]) + (
        " and so on for %d nodes" % len(seen) if len(seen) > _NODES else "")


def _steps(steps: Iterable[int]) -> str:
    some = sorted(set(steps), reverse=True)
    if not some:
        return "no step"
    return "step%s %s" % ("s" if len(some) > 1 else "", ", ".join(map(str, some[:3]))) + (
        " and %d more" % (len(some) - 3) if len(some) > 3 else "")


def distrust(disk: Disk, step: int, saved_ns: int) -> str:
    """The reason why a save in memory must not be used, "" = it may: another step was chosen on disk since."""
    if disk.tracked is not None and disk.moved_ns > saved_ns and disk.tracked != step:
        return "the tracker was set to step %d after step %d was saved in memory" % (disk.tracked, step)
    return ""


def moved(tracked: Optional[int], tracker_ns: int, manifest_ns: int) -> int:
    """When the tracker was set by hand, 0 = it was not: modification times of the tracker and of the manifest of the
    step that it names (0 = there is none)."""
    if tracked is None or (manifest_ns and tracker_ns <= manifest_ns + _SLACK_NS):
        return 0
    return tracker_ns


def prefer_memory(memory: Optional[Tuple[str, int, int]], disk: Sequence[Commit],
                  ranks: Sequence[Sequence[Offer]]) -> bool:
    """Whether the save in memory is that on disk, or was made after it; steps may go back. The time of a save on disk
    is that of its first shard. So in memory the time of rank 0 is compared; clocks of other ranks may differ."""
    if memory is None or not disk:
        return memory is not None
    if any(c.save == memory[0] for c in disk):
        return memory[0] == disk[0].save
    first = min((o.saved_ns for o in ranks[0] if o.save == memory[0]), default=memory[2])
    return first > disk[0].saved_ns
