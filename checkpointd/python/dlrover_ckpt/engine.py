"""The checkpoint engine of one rank: saves images into shared memory or to disk, and loads them again."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import numbers
import os
import threading
import time
from enum import Enum
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Union

from . import copying, estimate, saveid, segment, sync
from .image import Image
from .inline import Cleaner, Gather, InlineWriter
from .notices import Dropped, Once, Stopwatch, Waits
from .pool import NoRoom, Pool, pool
from .ranks import RankInfo, Ranks
from .restore import DISK, MEMORY, MEMORY_FIRST, Loaded, Search, Wanted, directory_id
from .segment import Buffer, Pending
from .wire import Daemon, Refused

__all__ = ["Engine", "Loaded", "StorageType", "checked_dir", "checked_step"]

log = logging.getLogger("dlrover.ckpt")

_TOGETHER_PATIENCE = 300.0  # seconds that a rank may keep the others waiting at most: NCCL ends a job after 600
_LONG = 0.05  # seconds that a save may wait without a word
_UNTOLD = 10**8  # ns for which saves may have kept the process from training without a word
_REMEMBERED = 1000  # steps

_ALONE = ("there is no checkpoint daemon (dlrover-run starts one): DISK saves are written while training waits, and "
          "MEMORY saves last only as long as torchrun, or whoever started this process, lives")
_UNUSABLE = "shared memory cannot be used, checkpoints go to disk only: %s"

_once = Once()
_blocked = Stopwatch()  # runs while saves keep this process from training


class StorageType(Enum):
    """Where a save goes: MEMORY survives the training process, DISK survives the node as well."""

    MEMORY = 1
    DISK = 2


def checked_step(step: Any) -> int:
    """The number of a step. TypeError: it is no integer. ValueError: it is out of range."""
    if not isinstance(step, numbers.Integral) or isinstance(step, bool):
        raise TypeError("step must be an integer, not %r (%s)" % (step, type(step).__name__))
    number = int(step)
    if not 0 <= number < 1 << 63:
        raise ValueError("step must be from 0 to 2**63 - 1, not %d" % number)
    return number


def checked_dir(directory: Any) -> str:
    """The absolute path of a checkpoint directory; ~ is the home directory. ValueError: it is empty."""
    path = os.fsdecode(directory)
    if not path:
        raise ValueError("checkpoint_dir is empty: name the directory for the checkpoints (\".\" is the current one)")
    return os.path.abspath(os.path.expanduser(path))


def _blocks(method: Any) -> Any:
    """The daemon hears for how long a method keeps the process from training."""

    @functools.wraps(method)
    def blocking(self: "Engine", *args: Any, **kwargs: Any) -> Any:
        try:
            with _blocked:
                return method(self, *args, **kwargs)
        finally:
            if self._daemon is not None and _blocked.ns() - self._told > _UNTOLD:
                self._daemon.notify({"op": "saved", "blocked_ns": self._tell()})

    return blocking


class Engine:
    """Checkpoints of one rank. Calls of one engine must not overlap; save and load are made by all ranks.

    shard, shards      this rank's part of a save, and the number of parts
    primary            whether this rank writes its shard to disk
    holder             whether it keeps its shard in memory at all
    resize             "any": a shard is the full state, and usable in a world of another size; else "same"
    deletion_strategy  selects by retention() or clean_up() the old steps to remove
    save_timeout       seconds after which a save that not all ranks have finished is aborted
    replica_count      copies of a shard in the memory of other nodes, 0 or 1 = none
    group              the torch.distributed group of all ranks, None = the default one
    drop_superseded    whether a DISK save takes the place of an older one that still waits for the disk, when there is
                       no room for both; else training waits, at most for save_timeout (several ranks: half of it, and
                       at most 300 s), and the save is written here and now

    reshards           whether saves of another number of shards can be read from disk

    ValueError: there is no such shard, or the directory's name is empty. OSError: the directory cannot be made.
    In a child that was forked from the process, save and load raise RuntimeError.
    """

    dir: str  # absolute
    latest_step: int  # that was saved or loaded last, 0 = none

    def __init__(self, checkpoint_dir: Union[str, "os.PathLike[str]"], framework: str, *, shard: int, shards: int,
                 primary: bool, holder: bool = True, resize: str = "same", deletion_strategy: Any = None,
                 save_timeout: float = 600, replica_count: int = 0, group: Any = None,
                 drop_superseded: bool = False, reshards: bool = True) -> None:
        if not 0 <= shard < shards:
            raise ValueError("shard %d of %d" % (shard, shards))
        self.dir = checked_dir(checkpoint_dir)
        self.framework = framework
        self.shard = shard
        self.shards = shards
        self.primary = primary
        self.holder = holder
        self.resize = resize
        self.reshards = reshards
        self.latest_step = 0
        self.threads = copying.default_threads()
        self._retention = deletion_strategy.retention() if hasattr(deletion_strategy, "retention") else None
        self._timeout = save_timeout
        self._replicas = replica_count
        self._drop = drop_superseded
        self._pid = os.getpid()
        self._info = RankInfo(os.environ)
        self._ranks = Ranks(self._info, group)
        self._waits = Waits()
        self._dropped = Dropped(self._info.rank)
        self._disk_step: Optional[int] = None  # the newest DISK save
        self._saved: Dict[int, str] = {}  # step -> id of the newest DISK save of it
        self._incarnation = ""  # rank 0's word for this incarnation of the workers, when there was one
        self._note = ""  # the daemon's last report of the storage
        self._excuse = ""  # the daemon's last answer to wait
        self._told = 0  # ns of _blocked that the daemon has heard of
        self._runtime = ""
        self._launched = False
        self._pool: Optional[Pool] = None
        self._daemon: Optional[Daemon] = None
        os.makedirs(self.dir, exist_ok=True)
        self._start()
        self._inline = InlineWriter(self.dir, self._runtime if self._daemon is not None else "")
        asked = deletion_strategy is not None and self._retention is None and primary and shard == 0
        self._cleaner = Cleaner(self.dir, deletion_strategy) if asked else None

    # -----------------------------------------------------------------------------------------------------------------
    # Public
    # -----------------------------------------------------------------------------------------------------------------

    @_blocks
    def save(self, step: int, images: Union[Sequence[Image], Callable[[], Sequence[Image]]],
             storage_type: StorageType, trackers: Iterable[Tuple[str, str]] = ()) -> bool:
        """Saves images (a list, or a function that returns it, called on holders only). False: skipped, see the log.

        When it returns, the sources of the images may change. A MEMORY save is in shared memory then, and survives
        this process. A DISK save is on its way to the disk, or there already: see wait().

        trackers: [(path relative to the checkpoint directory, text)]; dlrover_latest.txt is always added.
        ValueError, TypeError: the storage type or the step is none. sync.SaveFailed or OSError: a save that goes to
        disk here, because there is no daemon or no room in shared memory, failed.
        """
        if not isinstance(storage_type, StorageType):
            raise ValueError("storage_type must be StorageType.MEMORY or StorageType.DISK, not %r" % (storage_type,))
        self._check_process()
        disk = storage_type is StorageType.DISK
        step = checked_step(step)
        meta = self._meta(step, trackers)
        made = self._made(images, meta, disk)
        try:
            stored, by_daemon = self._to_memory(meta, made, disk) if self.holder else (True, self._by_daemon(step, disk))
        except OSError as e:
            if disk:  # the other ranks count on this one
                raise
            _once.warn(_UNUSABLE, e)
            return False
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

    def load(self, want: str = MEMORY_FIRST) -> Optional[Loaded]:
        """Finds the newest save that every rank can load; called by all ranks together. None: nothing anywhere.

        want: "memory-first", "memory" or "disk"; ValueError: it is none of these. Logs in one line the save to load and
        the reasons against newer ones. Damaged saves are skipped. Unloadable (a RuntimeError): there are checkpoints
        that this job cannot load, and would overwrite.
        """
        if want not in (MEMORY_FIRST, MEMORY, DISK):
            raise ValueError('want must be "memory-first", "memory" or "disk", not %r' % want)
        self._check_process()
        wanted = Wanted(self.dir, self.framework, self.shard, self.shards, self.resize, self.reshards)
        search = Search(wanted, self._ranks, self._runtime, self._pool, self._daemon, self._inline.directory_lock)
        found = search.newest(want)
        self._incarnation = search.incarnation or self._incarnation
        if found is not None:
            self.latest_step = found.step
        return found

    @_blocks
    def wait(self, step: Optional[int] = None, timeout: float = 1800) -> int:
        """Waits until a step is committed (default: the newest DISK save) and returns it: it is on disk then, fsynced
        and named by the trackers. Without any DISK save it returns latest_step at once.

        timeout: seconds. TimeoutError: not by then. sync.SaveFailed, with the reason: it never will be. The step that
        is returned is a newer one when that has taken its place.
        """
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
        info = self._info
        try:
            self._runtime, self._launched = segment.runtime_dir(dict(os.environ))
            if self.holder:
                holders = min(info.local_world_size, self.shards)
                self._pool = pool(self._runtime, info.local_rank, holders, self._launched)
        except OSError as e:
            _once.warn(_UNUSABLE, e)
            return
        if self._launched:
            hello = {"rank": info.rank, "local_rank": info.local_rank, "world_size": info.world_size,
                     "pid": os.getpid(), "run": info.run, "epoch": info.epoch, "replicas": self._replicas}
            self._daemon = Daemon(os.path.join(self._runtime, "sock"), hello)
        if self._pool is not None:
            estimate.hear_steps()
            self._guessing = threading.Thread(target=self._guess, name="dlrover-ckpt-guess", daemon=True)
            self._guessing.start()

    def _guess(self) -> None:
        """Prepares memory for the first save without its size. It is only a hint."""
        try:
            assert self._pool is not None
            if self._pool.renew(self.dir):  # the segments of an earlier incarnation
                return
            size = estimate.from_disk(self.dir, self.shard, self.shards)
            if not size and self.shards == 1:
                estimate.from_steps(lambda nbytes: None if self.latest_step else self.prepare(nbytes))
            if size:
                self.prepare(size)
        except Exception as e:
            log.debug("no guess at the size of a checkpoint: %s", e)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("a checkpoint engine works only in the process that made it, not in a fork of it")

    # -----------------------------------------------------------------------------------------------------------------
    # Agreement: all ranks leave a save to their daemons, or none does
    # -----------------------------------------------------------------------------------------------------------------

    def _has_daemon(self) -> bool:
        """Whether requested saves will be written: by the daemon, or by its successor."""
        return self._daemon is not None and (self._daemon.present() or _owned(self._runtime))

    def _together(self) -> bool:
        """Whether a DISK save needs the other ranks' consent."""
        return self.shards > 1 and not self._ranks.agree_alone

    def _gather(self) -> Optional[Gather]:
        """The collective for a save that all ranks write together."""
        return self._ranks.gather if self._together() else None

    def _agree(self, disk: bool, stored: bool, lost: Optional[Pending] = None
               ) -> Tuple[bool, List[Tuple[int, Pending]]]:
        """Whether the daemons write this save, and the saves that each rank drops for it; the same answer on all ranks
        that contribute."""
        mine = (self._info.rank, disk and stored and self._has_daemon(), lost)
        answers = self._ranks.gather(mine) if disk and self._together() else [mine]
        return all(yes for _, yes, _ in answers), [(rank, lost) for rank, _, lost in answers if lost is not None]

    def _by_daemon(self, step: int, disk: bool, stored: bool = True) -> bool:
        """_agree for a rank that overwrites nothing."""
        by_daemon, dropped = self._agree(disk, stored)
        self._dropped.name(dropped, step)
        return by_daemon

    # -----------------------------------------------------------------------------------------------------------------
    # Saving
    # -----------------------------------------------------------------------------------------------------------------

    def _meta(self, step: int, trackers: Iterable[Tuple[str, str]]) -> Dict[str, Any]:
        """The description of a save for the segment."""
        import torch

        info = self._info
        save = saveid.new_save(info, self._incarnation, self.dir, step)
        named = [(path, text) for path, text in trackers if path != sync.LATEST] + [(sync.LATEST, str(step))]
        return {"run": info.run, "epoch": info.epoch, "save": save.id, "step": step, "rank": info.rank,
                "local_rank": info.local_rank, "world_size": info.world_size,
                "local_world_size": info.local_world_size, "node_rank": info.node_rank, "shard": self.shard,
                "shards": self.shards, "primary": self.primary, "dir": self.dir, "dir_id": directory_id(self.dir),
                "framework": self.framework, "layout": "", "resize": self.resize, "files": [],
                "trackers": [{"path": a, "text": b} for a, b in named], "retention": self._retention,
                "timeout_s": int(self._timeout), "replicas": self._replicas, "torch": torch.__version__,
                "saved_ns": save.begun_ns, "order": save.order}

    def _made(self, images: Any, meta: Dict[str, Any], disk: bool) -> List[Image]:
        if not self.holder:
            return []
        try:
            return list(images() if callable(images) else images)
        except Exception as e:
            if disk and self._together():  # the others must not wait for this rank
                self._by_daemon(meta["step"], disk, False)
                try:
                    self._inline.commit(meta, [], "rank %d: %s" % (meta["rank"], e), self._gather())
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
            return False, self._by_daemon(meta["step"], disk, False)
        try:
            lost = self._pool.displaced or (b.pending() if disk and self._drop else None)
            by_daemon, dropped = self._agree(disk, True, lost)
            wanted = by_daemon and self.primary
            seq = b.begin()
            self._dropped.name(dropped, meta["step"])  # not earlier: until here the daemon might still have it
            try:
                copying.fill(b, plans, bases, self.threads)
                saved_ns = b.publish(meta["step"], wanted, length, fix, text, meta["saved_ns"])
                saveid.note_times(self.dir, [saved_ns])
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
        alone = self._info.world_size == 1
        patience = self._timeout if alone else min(self._timeout / 2, _TOGETHER_PATIENCE)
        try:
            b = self._pool.acquire(need, disk, self.dir, self._drop, patience, self._has_daemon)
        except NoRoom as e:
            _once.warn("%s. Until then checkpoints go to %s on disk only", e, self.dir, about=self.dir)
            return None
        except OSError as e:  # such as ESTALE
            _once.warn(_UNUSABLE, e)
            return None
        if self._pool.waited > _LONG:
            self._waits.add(step, self._pool.waited)
        if b is None and not disk:
            log.warning("step %d is not saved in memory: every segment is still being written to disk", step)
        return b

    def _announce(self, b: Buffer, seq: int, step: int, disk: bool) -> None:
        """Notifies the daemon. Without that it finds the save, only later."""
        if self._daemon is None:
            _once.warn(_ALONE)
            segment.touch(self._runtime)
            return
        reply = self._daemon.notify({"op": "saved", "seg": os.path.basename(b.path), "seq": seq, "step": step,
                                     "disk": disk, "blocked_ns": self._tell()})
        note = reply.get("note", self._note)
        if note and note != self._note:
            log.warning("checkpoint daemon: %s", note)
        self._note = note

    def _tell(self) -> int:
        self._told = _blocked.ns()
        return self._told

    def _to_disk(self, meta: Dict[str, Any], images: Sequence[Image]) -> None:
        """Writes a save here and now."""
        if not self.primary and not self._together():
            return
        if self._daemon is None:
            _once.warn(_ALONE)
        else:
            log.warning("step %d is written to disk while training waits: it could not be left to the checkpoint "
                        "daemon", meta["step"])
        self._inline.write(meta, images, self._gather())

    def _clean_up(self) -> None:
        if self._cleaner is not None:
            self._cleaner.clean_up()

    # -----------------------------------------------------------------------------------------------------------------
    # Waiting
    # -----------------------------------------------------------------------------------------------------------------

    def _committed(self, step: int) -> bool:
        m = sync.manifest(self.dir, step)
        return m is not None and self._saved.get(step, m["save"]) == m["save"]

    def _await(self, step: int, patience: float) -> Optional[int]:
        """Asks the daemon to wait: the step that was committed. None: none yet, or there is no daemon."""
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
