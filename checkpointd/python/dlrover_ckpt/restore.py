"""Finding the newest save that every rank can load, in memory or on disk."""

from __future__ import annotations

import glob
import logging
import os
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import find, saveid, sync
from .pool import Pool
from .ranks import Ranks
from .reader import SegmentReader
from .segment import Damaged
from .wire import Daemon, Refused

log = logging.getLogger("dlrover.ckpt")

_OFFER_PATIENCE = 120.0  # seconds that the daemon may take for writes that are under way and copies from peers
_VERIFY_PATIENCE = 3600.0  # seconds

MEMORY_FIRST, MEMORY, DISK = "memory-first", "memory", "disk"  # where to look


class Loaded:
    """The result of load().

    source      "memory" or "disk"
    step        the step of the save
    world_size  the world size that saved it
    files       memory only: {path as saved: memoryview} of this rank's files; a private writable mapping
    manifest    disk only: the manifest of the step (the files are at dir/<path>). A checkpoint of another program has
                none: then it is {"step", "files": [{"path", "size"}]} of what lies in the step's directory
    dir         the checkpoint directory
    """

    def __init__(self, source: str, step: int, world_size: int, files: Dict[str, memoryview],
                 manifest: Dict[str, Any], dir: str) -> None:
        self.source = source
        self.step = step
        self.world_size = world_size
        self.files = files
        self.manifest = manifest
        self.dir = dir


class Unloadable(RuntimeError):
    """There are checkpoints, but this job cannot load them: a fresh start would overwrite them."""


class Wanted(NamedTuple):
    """The rank and the kind of the save to find. reshards: one of another number of shards can be read."""

    dir: str
    framework: str
    shard: int
    shards: int
    resize: str
    reshards: bool = True


class _Report(NamedTuple):
    """What one rank tells the others in a survey."""

    offers: List[find.Offer]
    disk: find.Disk
    incarnation: str  # rank 0's counts
    node: int
    in_order: bool  # interrupted commits had been completed when it looked at the disk
    opened: str  # the save in memory that it has opened already, "" = none
    more: bool  # its daemon may have more to offer if it has time


class Search:
    """One search for the newest save. All ranks make one, and call newest() together."""

    def __init__(self, wanted: Wanted, ranks: Ranks, runtime: str, pool: Optional[Pool], daemon: Optional[Daemon],
                 lock: Callable[[], ContextManager[Any]]) -> None:
        """runtime: the directory of the segments, "" = there is none. lock: see sync.commit."""
        self._wanted = wanted
        self._ranks = ranks
        self._runtime = runtime
        self._pool = pool
        self._daemon = daemon
        self._lock = lock
        self._notes: List[str] = []  # why it is not something newer
        self._opened: Optional[Loaded] = None  # this rank's newest save in memory, which may not be the chosen one
        self.incarnation = ""  # rank 0's word for this incarnation of the workers; "" = the ranks could not agree

    def newest(self, where: str) -> Optional[Loaded]:
        """The newest save that every rank can load; None: nothing anywhere. One log line has the choice and the reason.

        Unloadable: the saves do not fit this job, or not all nodes see them. All ranks raise it together."""
        alone = self._ranks.info.world_size > 1 and not self._ranks.initialized
        if alone and where != DISK:
            self._notes.append("memory is not used, because torch.distributed is not initialised and the ranks cannot "
                               "agree")
        found = self._newest(where, where != DISK and not alone)
        self._report(found)
        return found

    def _newest(self, where: str, in_memory: bool) -> Optional[Loaded]:
        world = self._ranks.info.world_size
        offers, everyone = self._survey(in_memory, 0.0 if in_memory else _OFFER_PATIENCE)
        memory = find.newest_in_memory([e.offers for e in everyone], world)
        if memory is None and in_memory and any(e.more for e in everyone):
            # only now wait for saves on their way to the disk or to this node
            offers, everyone = self._survey(in_memory, _OFFER_PATIENCE)
            memory = find.newest_in_memory([e.offers for e in everyone], world)
        commits = find.on_disk([e.disk for e in everyone]) if where != MEMORY else []
        saveid.note_times(self._wanted.dir, [o.saved_ns for e in everyone for o in e.offers]
                          + [c.saved_ns for c in everyone[0].disk.commits])
        prefer = find.prefer_memory(memory, commits, [e.offers for e in everyone])
        found = self._from_memory(memory, offers, everyone) if prefer and memory is not None else None
        self._opened = None
        apart = find.unseen([e.disk for e in everyone], [e.node for e in everyone])
        if apart:
            apart = "not all nodes see the same checkpoints in %s: %s" % (self._wanted.dir, apart)
            self._notes.append(apart)
        if found is None and where != MEMORY:
            found = self._from_disk(commits)
            if found is None and apart and not commits:
                raise Unloadable("%s; it has to be on storage that all nodes see: mount that there, copy the directory "
                                 "to the other nodes, or use another one to begin anew" % apart)
            found = found or self._foreign(everyone[0].disk.tracked)
        return found

    def _survey(self, in_memory: bool, patience: float) -> Tuple[List[find.Offer], List[_Report]]:
        """The saves that this rank can load from memory, and the sources of every rank. One collective is enough as a
        rule: each rank has opened its newest save in memory by then, and that is the one that is chosen."""
        offers, in_order, more = self._offers(patience)
        noted = len(self._notes)
        trusted, everyone = self._exchange(offers, in_order, more, in_memory)
        if not all(e.in_order for e in everyone):
            del self._notes[noted:]
            self._recover()
            trusted, everyone = self._exchange(offers, True, more, in_memory)
        if self._ranks.info.world_size == 1 or self._ranks.initialized:
            self.incarnation = everyone[0].incarnation  # torchrun starts workers again under the same names
        return trusted, everyone

    def _exchange(self, offers: List[find.Offer], in_order: bool, more: bool, in_memory: bool
                  ) -> Tuple[List[find.Offer], List[_Report]]:
        """The offers that the disk does not disprove, and the reports of all ranks."""
        disk = self._look()
        trusted = self._trusted(offers, disk) if in_memory else []
        newest = find.newest_in_memory([trusted], self._ranks.info.world_size)
        self._opened = self._open(newest[0], trusted) if newest is not None else None
        opened = newest[0] if newest is not None and self._opened is not None else ""
        mine = _Report(trusted, disk, os.urandom(8).hex(), self._ranks.info.node_rank, in_order, opened, more)
        everyone = self._ranks.gather(mine)
        if not all(isinstance(e, _Report) for e in everyone):
            raise Unloadable("the nodes have different versions of dlrover-run: use the same one on all of them")
        return trusted, everyone

    # -----------------------------------------------------------------------------------------------------------------
    # Memory
    # -----------------------------------------------------------------------------------------------------------------

    def _offers(self, patience: float) -> Tuple[List[find.Offer], bool, bool]:
        """The saves in memory for this rank, whether the daemon has recovered the directory, and whether it may have
        more. With patience it first finishes its writes, and fetches copies from other nodes."""
        if not self._runtime:
            return [], False, False
        names, more = self._offered(patience)
        recovered = names is not None
        if names is None:
            mine = "*" if self._wanted.resize == "any" else "l%d-*" % self._ranks.info.local_rank
            names = ["seg/" + os.path.basename(f) for f in glob.glob(os.path.join(self._runtime, "seg", mine + ".seg"))]
        offers = [self._offer(name) for name in sorted(names)]
        return [o for o in offers if o is not None], recovered, more

    def _offered(self, patience: float) -> Tuple[Optional[List[str]], bool]:
        """The segments that the daemon names, and whether there may be more; None: it does not answer."""
        if self._daemon is None:
            return None, False
        info = self._ranks.info
        try:
            reply = self._daemon.call({"op": "offers", "rank": info.rank, "local_rank": info.local_rank,
                                       "world_size": info.world_size, "dir": self._wanted.dir,
                                       "timeout_ms": int(patience * 1000)}, patience + 30)
            return [str(o["seg"]) for o in reply.get("offers") or []], bool(reply.get("more", True))
        except (OSError, ValueError, KeyError, Refused) as e:
            log.debug("the checkpoint daemon offers nothing: %s", e)
            return None, True

    def _offer(self, name: str) -> Optional[find.Offer]:
        w = self._wanted
        try:
            with SegmentReader(self._runtime, name, self._pool) as r:
                h, meta = r.read()
        except (OSError, Damaged, ValueError) as e:
            self._notes.append("%s: %s" % (name, e))
            return None
        if meta is None or meta["dir"] != w.dir or meta["framework"] != w.framework:
            return None
        if meta.get("dir_id") not in (None, directory_id(w.dir)):
            self._notes.append("step %d in memory belongs to an earlier %s" % (h.step, w.dir))
            return None
        if meta["shards"] != w.shards and meta["shard"] == w.shard:
            self._notes.append("step %d in memory is %s" % (h.step, _differs(meta["shards"], meta["world_size"], w.shards)))
        if (meta["shard"], meta["shards"]) != (w.shard, w.shards):
            return None
        return find.Offer(meta["save"], h.step, h.saved_ns, meta["world_size"], meta["resize"], name)

    def _trusted(self, offers: List[find.Offer], disk: find.Disk) -> List[find.Offer]:
        out = []
        for o in offers:
            why = find.distrust(disk, o.step, o.saved_ns)
            if why:
                self._notes.append(why)
            else:
                out.append(o)
        return out

    def _from_memory(self, chosen: Tuple[str, int, int], offers: Sequence[find.Offer], everyone: Sequence[_Report]
                     ) -> Optional[Loaded]:
        if all(e.opened == chosen[0] for e in everyone):
            return self._opened
        self._opened = None
        found = self._open(chosen[0], offers)
        if self._ranks.all(found is not None):
            return found
        self._notes.append("step %d in memory cannot be read on every rank" % chosen[1])
        return None

    def _open(self, save: str, offers: Sequence[find.Offer]) -> Optional[Loaded]:
        mine = [o for o in offers if o.save == save]
        mine.sort(key=lambda o: not o.seg.startswith("seg/l%d-" % self._ranks.info.local_rank))
        for o in mine:
            try:
                with SegmentReader(self._runtime, o.seg, self._pool) as r:
                    h, meta, files = r.lend(o.save)
                return Loaded("memory", h.step, meta["world_size"], files, {}, self._wanted.dir)
            except (OSError, Damaged, ValueError) as e:
                self._notes.append("step %d in memory (%s): %s" % (o.step, o.seg, e))
        return None

    # -----------------------------------------------------------------------------------------------------------------
    # Disk
    # -----------------------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Completes interrupted commits, where no daemon does. Collective: all look at the disk when it is done."""
        if self._ranks.info.rank == 0:
            with self._lock():
                self._notes.extend(sync.recover(self._wanted.dir))
        self._ranks.gather(None)

    def _look(self) -> find.Disk:
        """The saves on disk."""
        dir = self._wanted.dir
        ms, bad = sync.manifests(dir)
        self._notes.extend(bad)
        tracked, wrong = sync.tracker(dir)
        if wrong:
            self._notes.append(wrong)
        when = sync.manifest_mtime_ns(dir, tracked) if tracked is not None else 0
        if tracked is not None and not when:
            self._notes.append("%s names step %d, which has no manifest" % (sync.LATEST, tracked))
        return find.Disk([find.Commit(m["step"], m["save"], m["committed_ns"], m["saved_ns"], m["shards"],
                                      m["world_size"]) for m in ms], tracked,
                         find.moved(tracked, sync.tracker_mtime_ns(dir), when))

    def _from_disk(self, commits: Sequence[find.Commit]) -> Optional[Loaded]:
        for c in commits:
            if c.shards != self._wanted.shards and not self._wanted.reshards:
                raise Unloadable("step %d in %s is %s: load it with as many shards as it has, or use another directory to "
                                 "begin anew" % (c.step, self._wanted.dir,
                                                 _differs(c.shards, c.world_size, self._wanted.shards)))
            m = sync.manifest(self._wanted.dir, c.step)
            wrong = self._verify(m) if m is not None else "its manifest is gone"
            wrong = next((w for w in self._ranks.gather(wrong) if w), "")
            if not wrong and m is not None:
                return Loaded("disk", c.step, m["world_size"], {}, m, self._wanted.dir)
            self._notes.append("step %d on disk is damaged: %s" % (c.step, wrong))
        return None

    def _verify(self, m: Dict[str, Any]) -> str:
        """The errors of the files that this rank is going to read. Where all ranks read the same files, one rank of a
        node does."""
        w = self._wanted
        if m["shards"] == 1 and self._ranks.info.local_rank and self._ranks.initialized:
            return ""
        shards = [w.shard] if m["shards"] == w.shards else None
        if self._daemon is not None:
            try:
                reply = self._daemon.call({"op": "verify", "dir": w.dir, "step": m["step"], "shards": shards},
                                          _VERIFY_PATIENCE)
                return "" if reply.get("good") else str(reply.get("reason") or "its files do not match its manifest")
            except (OSError, ValueError, Refused) as e:
                log.debug("the checkpoint daemon does not verify: %s", e)
        return sync.verify(w.dir, m, shards)

    def _foreign(self, tracked: Optional[int]) -> Optional[Loaded]:
        """A checkpoint of another program, or of one before manifests: the tracker alone names it."""
        dir = self._wanted.dir
        if tracked is None or sync.manifest(dir, tracked) is not None:
            return None
        for name in ("%d", "iter_%07d", "global_step%d", "checkpoint-%d"):
            top = os.path.join(dir, name % tracked)
            if not os.path.isdir(top):
                continue
            files = [os.path.join(d, f) for d, _, names in os.walk(top) for f in names]
            files = [f for f in files if os.path.isfile(f)]
            listed = [{"path": os.path.relpath(f, dir), "size": os.path.getsize(f)} for f in sorted(files)]
            self._notes.append("the files of step %d are not verified" % tracked)
            return Loaded("disk", tracked, self._ranks.info.world_size, {}, {"step": tracked, "files": listed}, dir)
        return None

    def _report(self, found: Optional[Loaded]) -> None:
        said, dir = "; ".join(dict.fromkeys(self._notes)), self._wanted.dir
        if self._daemon is not None:  # nothing was found: from no source
            step, source = (found.step, found.source) if found is not None else (0, "")
            self._daemon.notify({"op": "loaded", "step": step, "source": source, "dir": dir})
        if found is not None:
            warn = self._notes and not self._ranks.info.local_rank  # one of a node is enough
            log.log(logging.WARNING if warn else logging.INFO, "checkpoint of step %d is loaded from %s%s", found.step,
                    found.source, " (%s)" % said if said else "")
        elif said:
            log.error("no checkpoint can be loaded from %s: %s", dir, said)
        else:
            log.info("there is no checkpoint in %s", dir)


def _differs(shards: int, world_size: int, own: int) -> str:
    return "of %d shard%s, saved by %d rank%s, and this job has %d" % (
        shards, "s" if shards != 1 else "", world_size, "s" if world_size != 1 else "", own)


def directory_id(dir: str) -> Optional[str]:
    """Which directory it is, even when another takes its name; None: it cannot be looked at."""
    try:
        st = os.stat(dir)
    except OSError:
        return None
    return "%d:%d" % (st.st_dev, st.st_ino)
