"""The checkpoint engine: saves images into shared memory or to disk, and loads them again."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import logging
import numbers
import os
import shutil
import threading
import time
from enum import Enum
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

from . import copying, estimate, find, segment, sync
from .image import Image
from .pool import NoRoom, Pool, pool
from .segment import Buffer, Damaged, Loan, Mapping
from .wire import Daemon, Refused

log = logging.getLogger("dlrover.ckpt")

_LOCK_PATIENCE = 10.0  # seconds; a worker that is being killed may hold a segment for a moment
_VIEW_PATIENCE = 30.0  # seconds that views may keep another worker's segment out of use
_OFFER_PATIENCE = 120.0  # seconds that the daemon may take for writes that are under way and copies from peers
_VERIFY_PATIENCE = 3600.0
_TOGETHER_PATIENCE = 300.0  # seconds that a rank may keep the others waiting at most: NCCL ends a job after 600
_TURN_PATIENCE = 30.0  # seconds that the daemon may take to complete another save of the directory
_LONG = 0.05  # seconds that a save may wait without a word
_WAIT_LINES = 10.0  # seconds between two lines about saves that waited for the disk


_ALONE = ("there is no checkpoint daemon (dlrover-run starts one): DISK saves are written while training waits, and "
          "MEMORY saves last only as long as torchrun, or whoever started this process, lives")


class StorageType(Enum):
    """Where a save goes: MEMORY survives the training process, DISK survives the node as well."""

    MEMORY = 1
    DISK = 2


class Loaded:
    """What load() found.

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


class _Place:
    """This process's place in the job, from the environment that launchers set."""

    def __init__(self, env: Dict[str, str]) -> None:
        def number(name: str, default: int) -> int:
            try:
                return int(env.get(name, ""))
            except ValueError:
                return default

        self.rank = number("RANK", 0)
        self.world_size = max(1, number("WORLD_SIZE", 1))
        self.local_rank = number("LOCAL_RANK", 0)
        self.local_world_size = max(self.local_rank + 1, number("LOCAL_WORLD_SIZE", 1))
        self.node_rank = max(0, number("GROUP_RANK", 0))
        self.run = env.get("DLROVER_CKPT_RUN") or env.get("TORCHELASTIC_RUN_ID") or "none"
        self.epoch = env.get("DLROVER_CKPT_EPOCH") or "%s.%s" % (env.get("TORCHELASTIC_RESTART_COUNT", "0"),
                                                                 env.get("MASTER_PORT", ""))


def checked_step(step: Any) -> int:
    """The number of a step. TypeError: it is no integer. ValueError: it is out of range."""
    if not isinstance(step, numbers.Integral) or isinstance(step, bool):
        raise TypeError("step must be an integer, not %r (%s)" % (step, type(step).__name__))
    if not 0 <= step < 1 << 63:
        raise ValueError("step must be from 0 to 2**63 - 1, not %d" % step)
    return int(step)


def checked_dir(directory: Any) -> str:
    """The absolute path of a checkpoint directory; ~ is the home directory. ValueError: it is empty."""
    path = os.fsdecode(directory)
    if not path:
        raise ValueError("checkpoint_dir is empty: name the directory for the checkpoints (\".\" is the current one)")
    return os.path.abspath(os.path.expanduser(path))


class _Once:
    """Warnings that are given once in a process, or once for each `about`."""

    def __init__(self) -> None:
        self._given: set = set()

    def warn(self, text: str, *args: Any, about: str = "") -> None:
        if (text, about) not in self._given:
            self._given.add((text, about))
            log.warning(text, *args)


class _Waits:
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
            log.warning("step %d waited %.3f s for the disk, because shared memory is full of DISK saves (%d saves have "
                        "waited %.3f s so far): save less often, or with drop_superseded=True", step, seconds,
                        self._number, self._seconds)


_once = _Once()
_REMEMBERED = 1000  # steps


class _Counts:
    """How often each step was saved: part of the save's id. Of steps that were saved long ago it knows only how often
    at most, so that one that is saved again gets a new id."""

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


_saves: Dict[Tuple[int, str], _Counts] = {}  # of each process and epoch
_orders: Dict[Tuple[int, str, str], int] = {}  # saves of each process and epoch into a directory
_latest: Dict[Tuple[int, str], int] = {}  # when the latest save was made that each process knows of a directory


class Engine:
    """Checkpoints of one rank. Calls of one engine must not overlap; save and load are made by all ranks.

    shard, shards      what this rank contributes to a save, and of how many parts a save is made
    primary            whether this rank writes its shard to disk
    holder             whether it keeps its shard in memory at all
    resize             "any": a shard is the full state, and usable in a world of another size; else "same"
    deletion_strategy  what says by retention() or clean_up() which old steps go
    save_timeout       seconds after which a save that not all ranks have finished is given up
    replica_count      copies of a shard in the memory of other nodes, 0 or 1 = none
    group              the torch.distributed group of all ranks, None = the default one
    drop_superseded    whether a DISK save takes the place of an older one that still waits for the disk, when there is
                       no room for both; else training waits, at most for save_timeout (several ranks: half of it, and
                       at most 300 s), and the save is written here and now

    In a child that was forked from the process, save and load raise RuntimeError.
    """

    latest_step: int

    def __init__(self, checkpoint_dir: str, framework: str, *, shard: int, shards: int, primary: bool,
                 holder: bool = True, resize: str = "same", deletion_strategy: Any = None, save_timeout: int = 600,
                 replica_count: int = 0, group: Any = None, drop_superseded: bool = False) -> None:
        if not 0 <= shard < shards:
            raise ValueError("shard %d of %d" % (shard, shards))
        self.dir = checked_dir(checkpoint_dir)
        self.framework = framework
        self.shard = shard
        self.shards = shards
        self.primary = primary
        self.holder = holder
        self.resize = resize
        self.latest_step = 0
        self.threads = copying.default_threads()
        self._strategy = deletion_strategy
        self._retention = deletion_strategy.retention() if hasattr(deletion_strategy, "retention") else None
        self._timeout = save_timeout
        self._replicas = replica_count
        self._group = group
        self._drop = drop_superseded
        self._waits = _Waits()
        self._pid = os.getpid()
        self._place = _Place(dict(os.environ))
        self._disk_step: Optional[int] = None  # the newest DISK save
        self._saved: Dict[int, str] = {}  # step -> id of the newest DISK save of it
        self._tracked: Optional[int] = None
        self._ground: Optional[Dict[str, Tuple[int, int]]] = None  # of the directory, once a save was committed from here
        self._life = ""  # rank 0's word for this incarnation of the workers, when there was one
        self._note = ""  # what the daemon said last about the storage
        self._excuse = ""  # what the daemon said last when it was asked to wait
        self._runtime = ""
        self._launched = False
        self._pool: Optional[Pool] = None
        self._daemon: Optional[Daemon] = None
        os.makedirs(self.dir, exist_ok=True)
        self._start()

    # -----------------------------------------------------------------------------------------------------------------
    # Public
    # -----------------------------------------------------------------------------------------------------------------

    def save(self, step: int, images: Union[Sequence[Image], Callable[[], Sequence[Image]]],
             storage_type: StorageType, trackers: Iterable[Tuple[str, str]] = ()) -> bool:
        """Saves images (a list, or a function that returns it, called on holders only). False: skipped, see the log.

        trackers: [(path relative to the checkpoint directory, text)]; dlrover_latest.txt is always added.
        ValueError, TypeError: the storage type or the step is none. sync.SaveFailed or OSError: a save that goes to disk
        here, because there is no daemon or no room in shared memory, failed.
        """
        if not isinstance(storage_type, StorageType):
            raise ValueError("storage_type must be StorageType.MEMORY or StorageType.DISK, not %r" % (storage_type,))
        self._check_process()
        disk = storage_type is StorageType.DISK
        step = checked_step(step)
        meta = self._meta(step, trackers)
        made = self._made(images, meta, disk)
        stored, by_daemon = self._to_memory(meta, made, disk) if self.holder else (True, self._by_daemon(disk, True))
        self.latest_step = step
        if not disk:
            return stored
        self._disk_step = step
        self._saved.pop(step, None)  # the newest come last
        self._saved[step] = meta["save"]
        if len(self._saved) > _REMEMBERED:
            del self._saved[next(iter(self._saved))]
        if not by_daemon:
            self._to_disk(meta, made)
        self._clean_up()
        return True

    def load(self, want: str = "memory-first") -> Optional[Loaded]:
        """Finds the newest save that every rank can load; called by all ranks together. None: nothing anywhere.

        want: "memory-first", "memory" or "disk". Says in one log line what is loaded and why not something newer.
        """
        if want not in ("memory-first", "memory", "disk"):
            raise ValueError('want must be "memory-first", "memory" or "disk", not %r' % want)
        self._check_process()
        notes: List[str] = []
        world = self._place.world_size
        alone = world > 1 and not self._distributed()
        if alone and want != "disk":
            notes.append("memory is not used, because torch.distributed is not initialised and the ranks cannot agree")
        in_memory = want != "disk" and not alone
        offers, everyone = self._survey(in_memory, 0.0 if in_memory else _OFFER_PATIENCE, notes)
        memory = find.newest_in_memory([e[0] for e in everyone], world)
        if memory is None and in_memory:  # only now it is worth waiting for what is on its way to the disk or here
            offers, everyone = self._survey(in_memory, _OFFER_PATIENCE, notes)
            memory = find.newest_in_memory([e[0] for e in everyone], world)
        commits = find.on_disk([e[1] for e in everyone]) if want != "memory" else []
        self._note_time([o.saved_ns for e in everyone for o in e[0]] + [c.saved_ns for c in everyone[0][1].commits])
        prefer = find.prefer_memory(memory, commits, [e[0] for e in everyone])
        found = self._load_memory(memory, offers, notes) if prefer else None
        if found is None and want != "memory":
            found = self._load_disk(commits, notes) or self._load_foreign(everyone[0][1].tracked, notes)
        self._report(found, notes)
        return found

    def wait(self, step: Optional[int] = None, timeout: float = 1800) -> int:
        """Waits until a step is committed (default: the newest DISK save) and returns it; raises with the reason:
        TimeoutError, or sync.SaveFailed when the step will not be committed any more."""
        self._check_process()
        step = self._disk_step if step is None else checked_step(step)
        if step is None:
            return self.latest_step  # nothing was asked for
        deadline = time.monotonic() + timeout
        pause = 0.02
        while True:
            if self._committed(step):
                self._clean_up()
                return step
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("step %d was not committed in %s within %g s%s"
                                   % (step, self.dir, timeout, self._excuse and ": " + self._excuse))
            newer = self._await(step, min(left, 20.0))
            if newer is not None:
                return newer
            time.sleep(min(pause, left))
            pause = min(0.5, pause * 1.5)

    def prepare(self, nbytes: int) -> None:
        """Allocates and faults in segments for saves of nbytes, in the background."""
        self._check_process()
        if self.holder and self._pool is not None:
            self._pool.prepare(segment.room(nbytes + nbytes // 50, 0, 1 << 20), self.dir)

    # -----------------------------------------------------------------------------------------------------------------
    # Start
    # -----------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        p = self._place
        try:
            self._runtime, self._launched = segment.runtime_dir(dict(os.environ))
            if self.holder:
                self._pool = pool(self._runtime, p.local_rank, min(p.local_world_size, self.shards), self._launched)
        except OSError as e:
            _once.warn("shared memory cannot be used, checkpoints go to disk only: %s", e)
            return
        if self._launched:
            hello = {"rank": p.rank, "local_rank": p.local_rank, "world_size": p.world_size, "pid": os.getpid(),
                     "run": p.run, "epoch": p.epoch, "replicas": self._replicas}
            self._daemon = Daemon(os.path.join(self._runtime, "sock"), hello)
        if self._pool is not None:
            self._guessing = threading.Thread(target=self._guess, name="dlrover-ckpt-guess", daemon=True)
            self._guessing.start()

    def _guess(self) -> None:
        """Prepares memory for the first save without being told its size. It is only a hint."""
        try:
            assert self._pool is not None
            capacity = self._pool.capacity(self.dir)
            if capacity:  # the segments of an earlier incarnation
                self._pool.prepare(capacity, self.dir)
                return
            size = estimate.from_disk(self.dir, self.shard, self.shards)
            if not size and self.shards == 1:
                size = estimate.from_modules()
            if size:
                self.prepare(size)
        except Exception as e:
            log.debug("no guess at the size of a checkpoint: %s", e)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("a checkpoint engine works only in the process that made it, not in a fork of it")

    def _has_daemon(self) -> bool:
        """Whether somebody will write what is asked for: the daemon, or the one that takes its place."""
        return self._daemon is not None and (self._daemon.present() or _owned(self._runtime))

    # -----------------------------------------------------------------------------------------------------------------
    # Agreement
    # -----------------------------------------------------------------------------------------------------------------

    def _distributed(self) -> bool:
        import torch

        return torch.distributed.is_available() and torch.distributed.is_initialized()

    def _gather(self, value: Any) -> List[Any]:
        """The values of all ranks, in their order."""
        if self._place.world_size == 1 or not self._distributed():
            return [value]
        import torch

        out: List[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(out, value, group=self._group)
        return out

    def _together(self, disk: bool) -> bool:
        """Whether a save needs the other ranks' consent: all write it by the daemon, or none."""
        return disk and self.shards > 1 and self._place.world_size > 1 and self._distributed()

    def _by_daemon(self, disk: bool, stored: bool) -> bool:
        """Whether the daemons write this save: the same answer on all ranks that contribute to it."""
        mine = disk and stored and self._has_daemon()
        return self._all(mine) if self._together(disk) else mine

    def _all(self, yes: bool) -> bool:
        return all(self._gather(yes))

    # -----------------------------------------------------------------------------------------------------------------
    # Saving
    # -----------------------------------------------------------------------------------------------------------------

    def _meta(self, step: int, trackers: Iterable[Tuple[str, str]]) -> Dict[str, Any]:
        import torch

        p = self._place
        count = _saves.setdefault((self._pid, p.epoch), _Counts()).next(step)
        save = hashlib.sha256(("%s|%s%s|%d|%d" % (p.run, p.epoch, self._life, step, count)).encode()).hexdigest()[:16]
        begun = max(time.time_ns(), _latest.get((self._pid, self.dir), 0) + 1)  # the clock may have been another node's
        _orders[self._pid, p.epoch, self.dir] = order = _orders.get((self._pid, p.epoch, self.dir), 0) + 1
        named = [(path, text) for path, text in trackers if path != sync.LATEST] + [(sync.LATEST, str(step))]
        return {"run": p.run, "epoch": p.epoch, "save": save, "step": step, "rank": p.rank,
                "local_rank": p.local_rank, "world_size": p.world_size, "local_world_size": p.local_world_size,
                "node_rank": p.node_rank, "shard": self.shard, "shards": self.shards, "primary": self.primary,
                "dir": self.dir, "dir_id": _identity(self.dir), "framework": self.framework, "layout": "",
                "resize": self.resize, "files": [], "trackers": [{"path": a, "text": b} for a, b in named],
                "retention": self._retention, "timeout_s": int(self._timeout), "replicas": self._replicas,
                "torch": torch.__version__, "saved_ns": begun, "order": order}

    def _made(self, images: Any, meta: Dict[str, Any], disk: bool) -> List[Image]:
        if not self.holder:
            return []
        try:
            return list(images() if callable(images) else images)
        except Exception as e:
            if self._together(disk):  # the others must not wait for this rank
                self._all(False)
                try:
                    self._commit(meta, [], "rank %d: %s" % (meta["rank"], e))
                except sync.SaveFailed:
                    pass
            raise

    def _to_memory(self, meta: Dict[str, Any], images: Sequence[Image], disk: bool) -> Tuple[bool, bool]:
        """Copies a save into a segment. Returns whether it did, and whether the daemons write it to disk."""
        bases, length = copying.offsets([i.length for i in images])
        meta["files"] = [{"path": i.path, "off": o, "len": i.length, "kind": i.kind} for i, o in zip(images, bases)]
        meta["layout"] = hashlib.sha256("|".join(i.layout for i in images).encode()).hexdigest()[:32]
        text = json.dumps(meta).encode()
        plans = [i.plan() for i in images]
        fix = copying.pack_fixups(plans, bases)
        need = segment.room(length, len(fix) // 32, len(text))
        b = self._acquire(need, meta["step"], disk)
        if b is None or self._pool is None:
            return False, self._by_daemon(disk, False)
        try:
            by_daemon = self._by_daemon(disk, True)
            wanted = by_daemon and self.primary
            seq = b.begin()
            try:
                copying.fill(b, plans, bases, self.threads)
                _latest[self._pid, self.dir] = b.publish(meta["step"], wanted, length, fix, text, meta["saved_ns"])
            except BaseException:
                b.abort()
                raise
        finally:
            self._pool.release(b)
        self._pool.prepare(need, self.dir)
        self._announce(b, seq, meta["step"], wanted)
        return True, by_daemon

    def _acquire(self, need: int, step: int, disk: bool) -> Optional[Buffer]:
        if self._pool is None:
            return None
        alone = self._place.world_size == 1
        patience = self._timeout if alone else min(self._timeout / 2, _TOGETHER_PATIENCE)
        try:
            b = self._pool.acquire(need, disk, self.dir, self._drop, patience, self._has_daemon)
        except NoRoom as e:
            _once.warn("%s. Give the container more with --shm-size; until then checkpoints go to %s on disk only", e,
                       self.dir, about=self.dir)
            return None
        if self._pool.waited > _LONG:
            self._waits.add(step, self._pool.waited)
        if b is None and not disk:
            log.warning("step %d is not saved in memory: every segment is still being written to disk", step)
        if b is not None and disk and self._drop:
            self._name_dropped(b, step)
        return b

    def _name_dropped(self, b: Buffer, step: int) -> None:
        try:
            h = b.header()
        except Damaged:
            return
        if h.pending:
            log.warning("step %d is dropped before it was on disk: step %d takes its place, and drop_superseded is set",
                        h.step, step)

    def _announce(self, b: Buffer, seq: int, step: int, disk: bool) -> None:
        """Tells the daemon. It finds the save without that, only later."""
        if self._daemon is None:
            _once.warn(_ALONE)
            segment.touch(self._runtime)
            return
        reply = self._daemon.notify({"op": "saved", "seg": os.path.basename(b.path), "seq": seq, "step": step,
                                     "disk": disk})
        note = reply.get("note", self._note)
        if note and note != self._note:
            log.warning("checkpoint daemon: %s", note)
        self._note = note

    def _to_disk(self, meta: Dict[str, Any], images: Sequence[Image]) -> None:
        """Writes a save here and now."""
        if not self.primary and not self._together(True):
            return
        if self._daemon is None:
            _once.warn(_ALONE)
        else:
            log.warning("step %d is written to disk while training waits: it could not be left to the checkpoint "
                        "daemon", meta["step"])
        files: List[Dict[str, Any]] = []
        error, ground = "", self._ground
        if self.primary:
            try:
                if self._ground is not None:
                    sync.still_there(self.dir, self._ground)
                files = sync.write_shard(meta, images)
                ground = sync.ground(self.dir)
            except (OSError, ValueError) as e:
                error = "rank %d: %s" % (meta["rank"], e)
        self._commit(meta, files, error)
        self._ground = ground

    def _commit(self, meta: Dict[str, Any], files: List[Dict[str, Any]], error: str) -> None:
        agree = self._gather if self._together(True) else None
        sync.commit(meta, files, error, agree, time.monotonic() + self._timeout, self._turn)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Nobody else on this node completes a save of the directory: each looks at what the trackers name, and may
        then move them. Whoever dies gives the turn up; one that is stopped is waited for only so long."""
        if self._daemon is None:  # then rank 0 alone completes saves
            yield
            return
        name = "turn-" + hashlib.sha256(self.dir.encode()).hexdigest()[:16]
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(os.path.join(self._runtime, name), flags, 0o600)
        except OSError as e:
            log.debug("a save is completed out of turn: %s", e)
            yield
            return
        try:
            deadline = time.monotonic() + _TURN_PATIENCE
            while not _flocked(fd) and time.monotonic() < deadline:
                time.sleep(0.01)
            yield
        finally:
            os.close(fd)

    def _clean_up(self) -> None:
        """Asks a strategy that is not plain data which old step goes; it is told of each committed step once."""
        if self._strategy is None or self._retention is not None or not self.primary or self.shard:
            return
        now = sync.tracked(self.dir)
        if now != self._tracked and self._tracked is not None:
            self._strategy.clean_up(self._tracked, self._delete)
        self._tracked = now

    def _delete(self, path: str) -> None:
        inside = os.path.abspath(path) + os.sep
        for m in sync.manifests(self.dir)[0]:
            if any(os.path.join(self.dir, f["path"]).startswith(inside) for f in m["files"]):
                sync.remove(self.dir, m["step"])
        shutil.rmtree(path, ignore_errors=True)

    # -----------------------------------------------------------------------------------------------------------------
    # Waiting
    # -----------------------------------------------------------------------------------------------------------------

    def _committed(self, step: int) -> bool:
        m = sync.manifest(self.dir, step)
        return m is not None and self._saved.get(step, m["save"]) == m["save"]

    def _await(self, step: int, patience: float) -> Optional[int]:
        """Asks the daemon to wait: the step that was committed. None: none yet, or nobody to ask."""
        if self._daemon is None:
            return None
        began = time.monotonic()
        try:
            reply = self._daemon.call({"op": "wait", "dir": self.dir, "step": step, "save": self._saved.get(step, ""),
                                       "timeout_ms": int(patience * 1000)}, patience + 5)
        except (OSError, ValueError):
            return None
        except Refused as e:
            self._excuse = str(e)
            if time.monotonic() - began >= patience - 0.01 or self._committed(step):
                return None
            raise sync.SaveFailed("step %d is not committed: %s" % (step, e)) from None
        committed = reply.get("committed")
        return committed if isinstance(committed, int) and committed >= step else None

    # -----------------------------------------------------------------------------------------------------------------
    # Loading
    # -----------------------------------------------------------------------------------------------------------------

    def _survey(self, in_memory: bool, patience: float, notes: List[str]) -> Tuple[List[find.Offer], List[Any]]:
        """What this rank can load from memory, and what every rank can load from where."""
        offers, in_order = self._offers(patience, notes)
        disk = self._look(in_order, notes)
        offers = self._trusted(offers, disk, notes) if in_memory else []
        everyone = self._gather((offers, disk, os.urandom(8).hex()))
        if self._place.world_size == 1 or self._distributed():
            self._life = everyone[0][2]  # torchrun starts workers again under the same names
        return offers, everyone

    def _offers(self, patience: float, notes: List[str]) -> Tuple[List[find.Offer], bool]:
        """What lies in memory for this rank, and whether the daemon has put the directory in order. With patience the
        daemon first ends what is on its way to the disk, and fetches copies from other nodes."""
        if not self._runtime:
            return [], False
        p = self._place
        names: Optional[List[str]] = None
        if self._daemon is not None:
            try:
                reply = self._daemon.call({"op": "offers", "rank": p.rank, "local_rank": p.local_rank,
                                           "world_size": p.world_size, "dir": self.dir,
                                           "timeout_ms": int(patience * 1000)}, patience + 30)
                names = [str(o["seg"]) for o in reply.get("offers") or []]
            except (OSError, ValueError, KeyError, Refused) as e:
                log.debug("the checkpoint daemon offers nothing: %s", e)
        recovered = names is not None
        if names is None:
            mine = "*" if self.resize == "any" else "l%d-*" % p.local_rank
            names = ["seg/" + os.path.basename(f) for f in glob.glob(os.path.join(self._runtime, "seg", mine + ".seg"))]
        offers = []
        for name in sorted(names):
            o = self._offer(name, notes)
            if o is not None:
                offers.append(o)
        return offers, recovered

    def _offer(self, name: str, notes: List[str]) -> Optional[find.Offer]:
        try:
            with _Reader(self._runtime, name, self._pool) as r:
                h, meta = segment.read_save(r.fd)
        except (OSError, Damaged, ValueError) as e:
            notes.append("%s: %s" % (name, e))
            return None
        if meta is None or meta["dir"] != self.dir or meta["framework"] != self.framework:
            return None
        if meta.get("dir_id") not in (None, _identity(self.dir)):
            notes.append("step %d in memory belongs to an earlier %s" % (h.step, self.dir))
            return None
        if (meta["shard"], meta["shards"]) != (self.shard, self.shards):
            return None
        return find.Offer(meta["save"], h.step, h.saved_ns, meta["world_size"], meta["resize"], name)

    def _trusted(self, offers: List[find.Offer], disk: find.Disk, notes: List[str]) -> List[find.Offer]:
        out = []
        for o in offers:
            why = find.distrust(disk, o.step, o.saved_ns)
            if why:
                notes.append(why)
            else:
                out.append(o)
        return out

    def _look(self, in_order: bool, notes: List[str]) -> find.Disk:
        """What is on disk, after interrupted commits are completed (in_order: the daemon has done that)."""
        if not self._all(in_order):
            if self._place.rank == 0:
                with self._turn():
                    notes.extend(sync.recover(self.dir))
            self._gather(None)  # the others look when it is done
        ms, bad = sync.manifests(self.dir)
        notes.extend(bad)
        tracked, wrong = sync.tracker(self.dir)
        if wrong:
            notes.append(wrong)
        when = sync.manifest_mtime_ns(self.dir, tracked) if tracked is not None else 0
        if tracked is not None and not when:
            notes.append("%s names step %d, which has no manifest" % (sync.LATEST, tracked))
        return find.Disk([find.Commit(m["step"], m["save"], m["committed_ns"], m["saved_ns"]) for m in ms], tracked,
                         find.moved(tracked, sync.tracker_mtime_ns(self.dir), when))

    def _note_time(self, saved_ns: List[int]) -> None:
        """What is saved from now on comes after what was found, whatever the clock says."""
        key = self._pid, self.dir
        _latest[key] = max(saved_ns + [_latest.get(key, 0)])

    def _load_memory(self, chosen: Optional[Tuple[str, int, int]], offers: Sequence[find.Offer],
                     notes: List[str]) -> Optional[Loaded]:
        assert chosen is not None
        mine = [o for o in offers if o.save == chosen[0]]
        mine.sort(key=lambda o: not o.seg.startswith("seg/l%d-" % self._place.local_rank))
        found: Optional[Loaded] = None
        for o in mine:
            try:
                found = self._open(o)
                break
            except (OSError, Damaged, ValueError) as e:
                notes.append("step %d in memory (%s): %s" % (o.step, o.seg, e))
        if self._all(found is not None):
            return found
        notes.append("step %d in memory cannot be read on every rank" % chosen[1])
        return None

    def _open(self, o: find.Offer) -> Loaded:
        with _Reader(self._runtime, o.seg, self._pool) as r:
            _lock_shared(r)
            h, meta = segment.read_save(r.fd)
            if meta is None or meta["save"] != o.save:
                raise Damaged("it was overwritten")
            m = Mapping(r.fd, os.fstat(r.fd).st_size, private=True)
            view = m.view
            files = {f["path"]: view[h.image_off + f["off"]:h.image_off + f["off"] + f["len"]] for f in meta["files"]}
            r.lend(m)
        return Loaded("memory", h.step, meta["world_size"], files, {}, self.dir)

    def _load_disk(self, commits: Sequence[find.Commit], notes: List[str]) -> Optional[Loaded]:
        for c in commits:
            m = sync.manifest(self.dir, c.step)
            wrong = self._verify(m) if m is not None else "its manifest is gone"
            wrong = next((w for w in self._gather(wrong) if w), "")
            if not wrong and m is not None:
                return Loaded("disk", c.step, m["world_size"], {}, m, self.dir)
            notes.append("step %d on disk is damaged: %s" % (c.step, wrong))
        return None

    def _verify(self, m: Dict[str, Any]) -> str:
        """What is wrong with the files that this rank is going to read. Where all read the same, one of a node does."""
        if m["shards"] == 1 and self._place.local_rank and self._distributed():
            return ""
        shards = [self.shard] if m["shards"] == self.shards else None
        if self._daemon is not None:
            try:
                reply = self._daemon.call({"op": "verify", "dir": self.dir, "step": m["step"], "shards": shards},
                                          _VERIFY_PATIENCE)
                return "" if reply.get("good") else str(reply.get("reason") or "its files do not match its manifest")
            except (OSError, ValueError, Refused) as e:
                log.debug("the checkpoint daemon does not verify: %s", e)
        return sync.verify(self.dir, m, shards)

    def _load_foreign(self, tracked: Optional[int], notes: List[str]) -> Optional[Loaded]:
        """A checkpoint of another program, or of one before manifests: the tracker alone names it."""
        if tracked is None or sync.manifest(self.dir, tracked) is not None:
            return None
        for name in ("%d", "iter_%07d", "global_step%d", "checkpoint-%d"):
            top = os.path.join(self.dir, name % tracked)
            if not os.path.isdir(top):
                continue
            files = [os.path.join(d, f) for d, _, names in os.walk(top) for f in names]
            files = [f for f in files if os.path.isfile(f)]
            listed = [{"path": os.path.relpath(f, self.dir), "size": os.path.getsize(f)} for f in sorted(files)]
            notes.append("the files of step %d are not verified" % tracked)
            return Loaded("disk", tracked, self._place.world_size, {}, {"step": tracked, "files": listed}, self.dir)
        return None

    def _report(self, found: Optional[Loaded], notes: List[str]) -> None:
        said = "; ".join(dict.fromkeys(notes))
        if found is not None:
            self.latest_step = found.step
            if self._daemon is not None:
                self._daemon.notify({"op": "loaded", "step": found.step, "source": found.source, "dir": self.dir})
            level = logging.WARNING if notes and not self._place.local_rank else logging.INFO  # one of a node is enough
            log.log(level, "checkpoint of step %d is loaded from %s%s", found.step, found.source,
                    " (%s)" % said if said else "")
        elif said:
            log.error("no checkpoint can be loaded from %s: %s", self.dir, said)
        else:
            log.info("there is no checkpoint in %s", self.dir)


# ---------------------------------------------------------------------------------------------------------------------
# Reading segments
# ---------------------------------------------------------------------------------------------------------------------


class _Borrowed:
    """Segments of others that this process has open, by device and inode. There is one descriptor of each: closing
    another one of the same file would drop the lock that the first one holds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: Dict[Tuple[int, int], List[int]] = {}  # -> [descriptor, users]

    def take(self, path: str) -> Tuple[int, Tuple[int, int]]:
        with self._lock:
            st = os.stat(path, follow_symlinks=False)
            key = (st.st_dev, st.st_ino)
            if key not in self._users:
                fd = segment.open_segment(path)
                st = os.fstat(fd)
                key = (st.st_dev, st.st_ino)
                self._users.setdefault(key, [fd, 0])
            self._users[key][1] += 1
            return self._users[key][0], key

    def give_back(self, key: Tuple[int, int]) -> None:
        with self._lock:
            self._users[key][1] -= 1
            if self._users[key][1] == 0:
                os.close(self._users.pop(key)[0])


_borrowed = _Borrowed()


class _Reader:
    """A segment open for reading. Our own are read through their one descriptor, and lent views keep them out of
    use; those of others stay locked while views live, for a while."""

    def __init__(self, runtime: str, name: str, own: Optional[Pool]) -> None:
        parts = name.split("/")
        if len(parts) != 2 or parts[0] not in ("seg", "peer") or parts[1].startswith("."):
            raise Damaged("%r is no name of a segment" % name)
        self._path = os.path.join(runtime, name)
        self._pool = own if parts[0] == "seg" else None
        self._own: Optional[Buffer] = None
        self._key: Optional[Tuple[int, int]] = None  # of a borrowed one
        self.fd = -1

    def __enter__(self) -> "_Reader":
        if self._pool is not None:
            self._pool.hold()  # the preparation must not put another file in its place
        try:
            self._own = self._pool.by_name(self._path) if self._pool is not None else None
            if self._own is not None:
                self.fd = self._own.fd
            else:
                self.fd, self._key = _borrowed.take(self._path)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        if self._own is not None:
            segment.unlock(self.fd)
        if self._key is not None:
            _borrowed.give_back(self._key)
        self._release()

    def _release(self) -> None:
        if self._pool is not None:
            self._pool.guard.release()

    def lend(self, m: Mapping) -> None:
        loan = Loan(m)
        if self._own is not None:
            self._own.loans.append(loan)
            return
        assert self._key is not None
        threading.Thread(target=_give_back, args=(self._key, loan), name="dlrover-ckpt-views", daemon=True).start()
        self._key = None  # the thread gives it back


def _give_back(key: Tuple[int, int], loan: Loan) -> None:
    """Unlocks another worker's segment when its views are gone, or have been made independent of it."""
    deadline = time.monotonic() + _VIEW_PATIENCE
    while not loan.free() and time.monotonic() < deadline:
        time.sleep(0.2)
    while not loan.detach():
        time.sleep(5.0)
    _borrowed.give_back(key)


def _lock_shared(r: _Reader) -> None:
    deadline = time.monotonic() + _LOCK_PATIENCE
    while not segment.lock(r.fd, False):
        if time.monotonic() > deadline:
            raise Damaged("it is locked by another process")
        time.sleep(0.05)


def _identity(dir: str) -> Optional[str]:
    """Which directory it is, even when another takes its name."""
    try:
        st = os.stat(dir)
    except OSError:
        return None
    return "%d:%d" % (st.st_dev, st.st_ino)


def _flocked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def _owned(runtime: str) -> bool:
    """Whether the run's owner lives: it holds a lock."""
    try:
        fd = os.open(os.path.join(runtime, "owner"), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)
