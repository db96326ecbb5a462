"""Checkpoint directories without a daemon: writing a save, finishing interrupted ones, and finding the newest good one.

Order of a save: the list of temporary files; the temporary files, durable; the intent, from which there is only forward;
the final names; the manifest; the trackers. The processes that write its shards meet in torch.distributed before each of
the last four. Nothing is ever written in place, and no link is followed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import posixpath
import re
import stat
import struct
import time
import zlib
from typing import Any, Callable, ContextManager, Dict, Iterable, List, Optional, Sequence, Tuple

from .image import Image

LATEST = "dlrover_latest.txt"
_OWN = ".dlrover"
_BLOCK = 8 << 20  # bytes that are written or checked at a time
_LARGEST = 64 << 20  # bytes of a manifest that are read: 10,000 shards of 40 files
_LONGEST = 4 << 10  # of a tracker
_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
_STALE = 3600  # seconds of silence after which a stage is abandoned


class SaveFailed(RuntimeError):
    """A checkpoint that could not be written; the text says why."""


# ---------------------------------------------------------------------------------------------------------------------
# Small files
# ---------------------------------------------------------------------------------------------------------------------


def sync_dir(path: str) -> None:
    """Makes the names in a directory durable. Network file systems that refuse that do it by themselves."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def _new_file(path: str) -> int:
    _unlink(path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def write_small(path: str, data: bytes) -> None:
    """Atomic and durable."""
    head, base = os.path.split(path)
    os.makedirs(head, exist_ok=True)
    tmp = os.path.join(head, ".%s.%d.tmp" % (base, os.getpid()))
    fd = _new_file(tmp)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(tmp, path)
    sync_dir(head)


def _write_json(path: str, value: Any) -> None:
    write_small(path, json.dumps(value).encode())


def _open_regular(path: str) -> int:
    """A descriptor for reading. ValueError: it is a pipe or the like, which may block."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise ValueError("it is not a regular file")


def read_small(path: str, limit: int) -> bytes:
    """ValueError: it is longer than that, or not a regular file."""
    with os.fdopen(_open_regular(path), "rb") as f:
        size = os.fstat(f.fileno()).st_size
        data = f.read(limit + 1) if size <= limit else b""
    if max(size, len(data)) > limit:
        raise ValueError("it has %d bytes, at most %d are expected" % (max(size, len(data)), limit))
    return data


def _read_json(path: str) -> Any:
    try:
        return json.loads(read_small(path, _LARGEST).decode())
    except RecursionError:
        raise ValueError("its JSON is too deep") from None


def _list(path: str) -> List[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _inside(dir: str, path: str) -> str:
    """The absolute path of a file of a checkpoint. ValueError: it is not clean, or leaves the directory."""
    if posixpath.normpath(path) != path or path in (".", "/") or path.split("/")[0] in ("..", _OWN):
        raise ValueError("path %r is not clean, or leaves the checkpoint directory" % path)
    return path if path.startswith("/") else os.path.join(dir, path)


# ---------------------------------------------------------------------------------------------------------------------
# Saving
# ---------------------------------------------------------------------------------------------------------------------


def temporary(path: str, save: str) -> str:
    head, base = os.path.split(path)
    return os.path.join(head, ".%s.%s.tmp" % (base, save))


def mount_identity(dir: str) -> Dict[str, Tuple[int, int]]:
    """The mount identity of a directory: the inodes of it and of the directories above it, by path."""
    out: Dict[str, Tuple[int, int]] = {}
    path = os.path.realpath(dir)
    while path not in out:
        try:
            st = os.lstat(path)
            out[path] = (st.st_dev, st.st_ino)
        except FileNotFoundError:
            pass
        if path == "/":
            break
        path = os.path.dirname(path)
    return out


def still_there(dir: str, before: Dict[str, Tuple[int, int]]) -> None:
    """OSError: the commits of the directory are gone, and another directory is in its place, as when its storage is no
    longer mounted. A directory that was deleted is created again: the rest of its path has the same inodes."""
    own = os.path.join(dir, _OWN)
    now = mount_identity(dir)
    nearest = max(now, key=len)
    if not os.path.isdir(own) and before.get(nearest) != now[nearest]:
        raise OSError(errno.ENOENT, "%s has none of the checkpoints that were committed to it: mount it, or make %s to "
                                    "begin anew" % (dir, own))


def write_shard(meta: Dict[str, Any], images: Sequence[Image]) -> List[Dict[str, Any]]:
    """Makes this shard's files durable under temporary names. Returns the file entries."""
    dir, save, shard = meta["dir"], meta["save"], meta["shard"]
    paths = [_inside(dir, i.path) for i in images]
    for path in paths:
        if os.path.isdir(path):  # found out before there is no way back
            raise OSError(errno.EISDIR, "%s is a directory" % path)
    stage = _stage(dir, save)
    _write_json(os.path.join(stage, "shard-%d.plan" % shard), [temporary(i.path, save) for i in images])
    for d in (os.path.dirname(stage), os.path.join(dir, _OWN), dir):  # without these names the plan cannot be found
        sync_dir(d)
    files = []
    for image, path in zip(images, paths):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        tmp = temporary(path, save)
        crc = write_image(tmp, image)
        files.append({"path": image.path, "size": image.length, "crc32": crc, "shard": shard})
    for d in sorted({os.path.dirname(p) for p in paths}):
        sync_dir(d)
    return files


def write_image(path: str, image: Image) -> int:
    """Writes a new file, durably. Returns the CRC-32 of the whole."""
    plan = image.plan()
    fd = _new_file(path)
    try:
        os.ftruncate(fd, image.length)  # not posix_fallocate: without support for it, that is one write for each block
        for off, data in list(plan.fresh) + list(plan.pieces):
            _pwrite(fd, memoryview(data), off)
        for off, n, addr, storage in plan.sources:
            _pwrite(fd, _bytes_of(n, addr, storage), off)
        for off, n, dst1, dst2 in plan.fixed + plan.fixups:
            crc = struct.pack("<I", _crc(fd, off, n))
            for dst in (dst1, dst2):
                if dst:
                    os.pwrite(fd, crc, dst)
        whole = _crc(fd, 0, image.length)
        os.fsync(fd)
        return whole
    finally:
        os.close(fd)


def _bytes_of(n: int, addr: int, storage: Any) -> memoryview:
    if storage is not None:  # on a device
        copy = storage.cpu()
        data = (ctypes.c_ubyte * n).from_address(copy.data_ptr())
        setattr(data, "keep", copy)  # for as long as the view lives
        return memoryview(data).cast("B")
    return memoryview((ctypes.c_ubyte * n).from_address(addr)).cast("B")


def _pwrite(fd: int, data: memoryview, off: int) -> None:
    while len(data):
        n = os.pwrite(fd, data[:_BLOCK], off)
        data, off = data[n:], off + n


def _crc(fd: int, off: int, n: int) -> int:
    crc, end = 0, off + n
    while off < end:
        block = os.pread(fd, min(_BLOCK, end - off), off)
        if not block:
            raise OSError("the file ends at %d, expected %d" % (off, end))
        crc, off = zlib.crc32(block, crc), off + len(block)
    return crc


def commit(meta: Dict[str, Any], files: List[Dict[str, Any]], write_error: str,
           agree: Optional[Callable[[Any], List[Any]]],
           lock: Callable[[], ContextManager[Any]] = contextlib.nullcontext) -> None:
    """Takes a written shard to its final name and, as shard 0, publishes the save. SaveFailed: it is aborted.

    files: this shard's entries, empty for a process that writes no shard.
    write_error: why they could not be written, "" = they are.
    agree: gathers a value from all processes; None: this one writes the whole save.
    lock: the lock under which this node publishes one save of the directory at a time.
    """
    dir, save, writer = meta["dir"], meta["save"], meta["primary"]
    lead = writer and meta["shard"] == 0
    if agree is None and meta["shards"] > 1:
        write_error = write_error or "its %d shards need torch.distributed, which is not initialised" % meta["shards"]
    meet: Callable[[Any], List[Any]] = agree or (lambda value: [value])
    written = meet((write_error, meta["shard"] if writer else None, files))
    errors = [e for e, _, _ in written if e]
    missing = set(range(meta["shards"])).difference(shard for _, shard, _ in written)
    if missing:
        errors.append("no process writes shard %d of %d" % (min(missing), meta["shards"]))
    if errors:
        if writer:
            abandon(dir, save, meta["shard"])
        raise SaveFailed("step %d was not saved: %s" % (meta["step"], errors[0]))
    m = _manifest(meta, sorted((f for _, _, fs in written for f in fs), key=lambda f: f["shard"]))
    if lead:
        _write_json(os.path.join(_stage(dir, save), "intent"), m)
    meet(None)
    if writer:
        place(dir, save, files)
    meet(None)
    if lead:
        with lock():
            publish(dir, m)
            retain(dir)
    meet(None)


def _manifest(meta: Dict[str, Any], files: List[Dict[str, Any]]) -> Dict[str, Any]:
    return {"version": 1, "step": meta["step"], "save": meta["save"], "epoch": meta["epoch"],
            "shards": meta["shards"], "world_size": meta["world_size"], "framework": meta["framework"],
            "layout": meta["layout"], "saved_ns": meta["saved_ns"], "committed_ns": 0, "files": files,
            "trackers": meta["trackers"], "retention": meta["retention"]}


def _stage(dir: str, save: str) -> str:
    return os.path.join(dir, _OWN, "stage", save)


def place(dir: str, save: str, files: Iterable[Dict[str, Any]]) -> None:
    """Gives files their final names, durably. SaveFailed: neither the temporary file nor a final one of that size."""
    dirs = set()
    for f in files:
        path = _inside(dir, f["path"])
        try:
            os.rename(temporary(path, save), path)
        except FileNotFoundError:
            if not os.path.isfile(path) or os.path.getsize(path) != f["size"]:
                raise SaveFailed("%s is neither under its temporary nor under its final name" % path) from None
        dirs.add(os.path.dirname(path))
    for d in sorted(dirs):
        sync_dir(d)


def publish(dir: str, m: Dict[str, Any], recovered: bool = False) -> None:
    """Manifest, trackers, and the end of the stage. The trackers stay when they name a newer save of this epoch; those
    of any epoch when the save is recovered, because others may have gone on from another state."""
    m = dict(m, files=[{k: v for k, v in f.items() if k != "tmp"} for f in m["files"]])  # of an earlier version
    step = tracked(dir)
    last = manifest(dir, step) if step is not None else None
    moves = True
    m["committed_ns"] = time.time_ns()
    if last is not None:
        moves = last["saved_ns"] <= m["saved_ns"] or not recovered and last["epoch"] != m["epoch"]
        if moves:  # the clock may have been another node's
            m["committed_ns"] = max(m["committed_ns"], last["committed_ns"] + 1)
        else:
            m["committed_ns"] = _overtaken(dir, m, last)
    _write_json(os.path.join(dir, _OWN, "%d.json" % m["step"]), m)
    if moves:
        for t in m.get("trackers") or []:
            write_small(_inside(dir, t["path"]), t["text"].encode())
    _remove_stage(dir, m["save"])


def _overtaken(dir: str, m: Dict[str, Any], by: Dict[str, Any]) -> int:
    """When a save counts as committed that is older than what the tracker names: with the first save of its epoch that
    was made after it. Of the same time, what was made last is the newest."""
    later = [x["committed_ns"] for x in manifests(dir)[0]
             if x["epoch"] == m["epoch"] and x["save"] != m["save"] and x["saved_ns"] > m["saved_ns"]]
    return int(min(later + [by["committed_ns"]]))


def abandon(dir: str, save: str, shard: int) -> None:
    """Removes the files of a shard."""
    stage = _stage(dir, save)
    plan = os.path.join(stage, "shard-%d.plan" % shard)
    for tmp in _planned(dir, plan, save):
        _unlink(tmp)
    _unlink(plan)
    _rmdir(stage)


def _planned(dir: str, plan: str, save: str) -> List[str]:
    """The temporary files of a plan. They will be removed, so a path with any other name makes the plan invalid."""
    try:
        tmps = _read_json(plan)
        if not isinstance(tmps, list) or not all(isinstance(t, str) for t in tmps):
            raise ValueError("it is not a plan")
        for base in map(os.path.basename, tmps):
            if not base.startswith(".") or not base.endswith(".%s.tmp" % save):
                raise ValueError("%r is not a temporary file of save %s" % (base, save))
        return [_inside(dir, t) for t in tmps]
    except (OSError, ValueError):
        return []


def _remove_stage(dir: str, save: str) -> None:
    stage = _stage(dir, save)
    for name in sorted(_list(stage), key=lambda n: n == "intent"):  # the intent last: until then it can be repeated
        _unlink(os.path.join(stage, name))
    _rmdir(stage)


def _rmdir(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        pass  # not empty, or gone


# ---------------------------------------------------------------------------------------------------------------------
# Finding
# ---------------------------------------------------------------------------------------------------------------------


def recover(dir: str) -> List[str]:
    """Completes saves that were interrupted after their intent, in the order in which they were made, and removes
    earlier ones that no writer will commit. Returns the failures, as sentences."""
    intents, orphans, problems = _stages(dir)
    for m in sorted(intents, key=lambda m: m["saved_ns"]):
        try:
            place(dir, m["save"], m["files"])
            publish(dir, m, recovered=True)
        except (OSError, ValueError, SaveFailed) as e:
            problems.append("step %s cannot be completed: %s" % (m["step"], e))
    own = os.path.join(dir, _OWN)
    last = max((_mtime_ns(os.path.join(own, n)) for n in _list(own) if n.endswith(".json")), default=0)
    for save in orphans:
        _remove_orphan(dir, save, last)
    return problems


def _stages(dir: str) -> Tuple[List[Dict[str, Any]], List[str], List[str]]:
    """The intents of saves that can be completed, the saves without an intent, and the errors of others. A save that
    can never be completed is set aside."""
    intents, orphans, problems = [], [], []
    root = os.path.join(dir, _OWN, "stage")
    for save in _list(root):
        if not _ID.fullmatch(save):
            continue  # set aside
        try:
            m = _checked(_read_json(os.path.join(root, save, "intent")))
            if m["save"] != save:
                raise ValueError("it is that of save %s" % m["save"])
            _not_lost(dir, m)
            intents.append(m)
        except FileNotFoundError:
            orphans.append(save)
        except _Newer as e:
            problems.append("save %s cannot be completed: %s" % (save, e))
        except (OSError, ValueError) as e:
            problems.append(_set_aside(os.path.join(root, save), e))
    return intents, orphans, problems


def _set_aside(stage: str, why: Exception) -> str:
    """Renames a save that can never be completed, and keeps all that may help a person."""
    if isinstance(why, OSError) and why.errno not in (errno.ELOOP, errno.ENXIO):
        return "%s cannot be read: %s" % (stage, why)
    try:
        os.rename(stage, stage + ".damaged")
    except OSError as e:
        return "%s is damaged (%s) and cannot be set aside: %s" % (stage, why, e)
    return ("an interrupted commit is damaged and can never be completed; it is set aside in %s.damaged: %s"
            % (stage, why))


def _not_lost(dir: str, m: Dict[str, Any]) -> None:
    """ValueError: a file of a save with an intent is under neither of its names. Files elsewhere do not count: their
    storage may only be unmounted."""
    for f in m["files"]:
        path = _inside(dir, f["path"])
        if not os.path.isabs(f["path"]) and f["size"] not in (_size(temporary(path, m["save"])), _size(path)):
            raise ValueError("%s of step %d is lost" % (f["path"], m["step"]))


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return -1


def _remove_orphan(dir: str, save: str, last_ns: int) -> None:
    """Removes a save without an intent that was quiet since the last commit, or for long: no writer will commit it."""
    stage = _stage(dir, save)
    names = _list(stage)
    active = max((_mtime_ns(os.path.join(stage, n)) for n in names), default=_mtime_ns(stage))
    if "intent" in names or active >= last_ns and active > time.time_ns() - _STALE * 10**9:
        return  # perhaps another process is writing it right now
    for name in names:
        if name.endswith(".plan"):
            for tmp in _planned(dir, os.path.join(stage, name), save):
                _unlink(tmp)
                _remove_empty(dir, os.path.dirname(tmp))
    _remove_stage(dir, save)


def _mtime_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def tracked(dir: str) -> Optional[int]:
    """The step that the tracker names."""
    return tracker(dir)[0]


def read_tracker(path: str) -> str:
    """The text of a tracker. FileNotFoundError: there is none; OSError, ValueError: it cannot be one."""
    return read_small(path, _LONGEST).decode().strip()


def tracker(dir: str) -> Tuple[Optional[int], str]:
    """The step that the tracker names, and the error of a tracker that names none."""
    try:
        text = read_tracker(os.path.join(dir, LATEST))
        if not (text.isascii() and text.isdigit()) or int(text) >= 1 << 63:
            raise ValueError("it names no step")
        return int(text), ""
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError) as e:
        return None, "%s is not used: %s" % (LATEST, e)


def tracker_mtime_ns(dir: str) -> int:
    """When the tracker was written, 0 = there is none."""
    return _mtime_ns(os.path.join(dir, LATEST))


def manifest_mtime_ns(dir: str, step: int) -> int:
    """When the manifest of a step was written, 0 = there is none."""
    return _mtime_ns(os.path.join(dir, _OWN, "%d.json" % step))


def manifest(dir: str, step: int) -> Optional[Dict[str, Any]]:
    """The manifest of a committed step; None: there is none that can be read."""
    try:
        return _checked(_read_json(os.path.join(dir, _OWN, "%d.json" % step)), step)
    except (OSError, ValueError):
        return None


def manifests(dir: str) -> Tuple[List[Dict[str, Any]], List[str]]:
    """All manifests, the newest commit first, and the errors of those that cannot be read."""
    good, bad = [], []
    for name in _list(os.path.join(dir, _OWN)):
        stem, _, ext = name.rpartition(".")
        if ext != "json" or not stem.lstrip("-").isdigit():
            continue
        try:
            good.append(_checked(_read_json(os.path.join(dir, _OWN, name)), int(stem)))
        except (OSError, ValueError) as e:
            bad.append("step %s: its manifest is damaged (%s)" % (stem, e))
    return sorted(good, key=_newest_first), bad


def _newest_first(m: Dict[str, Any]) -> Tuple[int, int, int]:
    """Several saves that were overtaken by one have the same time of commit."""
    return -m["committed_ns"], -m["saved_ns"], -m["step"]


class _Newer(ValueError):
    """It is of a later version, and may be sound."""


_MANIFEST = (("version", int), ("step", int), ("save", str), ("epoch", str), ("shards", int), ("world_size", int),
             ("saved_ns", int), ("committed_ns", int), ("files", list))
_FILE = (("path", str), ("size", int), ("crc32", int), ("shard", int))
_TRACKER = (("path", str), ("text", str))


def _fits(value: Any, kinds: Sequence[Tuple[str, type]]) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(k), t) for k, t in kinds)


def _checked(m: Any, step: Optional[int] = None) -> Dict[str, Any]:
    """A manifest, or an intent. Its files are in the directory, except those that a save has put elsewhere."""
    if not _fits(m, _MANIFEST) or step not in (None, m["step"]):
        raise ValueError("it is not a manifest" + ("" if step is None else " of step %d" % step))
    if m["version"] > 1:
        raise _Newer("its version %d is not known" % m["version"])
    trackers = m.get("trackers") or []
    if not all(_fits(f, _FILE) for f in m["files"]) or not all(_fits(t, _TRACKER) for t in trackers):
        raise ValueError("it is not a manifest")
    for path in [f["path"] for f in m["files"]] + [t["path"] for t in trackers]:
        _inside("", path)
    if any(t["path"].startswith("/") for t in trackers):
        raise ValueError("it names a tracker elsewhere")
    checked: Dict[str, Any] = m
    return checked


def verify(dir: str, m: Dict[str, Any], shards: Optional[Sequence[int]] = None) -> str:
    """Reads the files of a manifest (of these shards, None: all). Returns the error, "" if there is none."""
    for f in m["files"]:
        if shards is not None and f["shard"] not in shards:
            continue
        try:
            path = _inside(dir, f["path"])
            fd = _open_regular(path)
        except (OSError, ValueError) as e:
            return "%s: %s" % (f["path"], e)
        try:
            size = os.fstat(fd).st_size
            if size != f["size"]:
                return "%s has %d bytes, expected %d" % (f["path"], size, f["size"])
            if _crc(fd, 0, size) != f["crc32"]:
                return "%s: its checksum differs" % f["path"]
        except OSError as e:
            return "%s: %s" % (f["path"], e)
        finally:
            os.close(fd)
    return ""


def retain(dir: str) -> List[int]:
    """Removes old steps, by the policy of the newest manifest. Returns them."""
    ms = manifests(dir)[0]
    policy = (ms[0].get("retention") if ms else None) or {}
    removed = drop(ms, policy, tracked(dir))
    for step in removed:
        remove(dir, step)
    return removed


def drop(ms: Sequence[Dict[str, Any]], policy: Dict[str, int], keep: Optional[int]) -> List[int]:
    """Which steps a policy removes: never the newest commit nor the step that the tracker names."""
    latest, interval = policy.get("keep_latest", 0), policy.get("keep_interval", 0)
    if latest > 0:
        out = [m["step"] for m in ms[latest:]]
    elif interval > 0:
        out = [m["step"] for m in ms if m["step"] % interval]
    else:
        out = []
    return [s for s in out if s != keep and s != ms[0]["step"]]


def remove(dir: str, step: int) -> None:
    """Removes a committed step: the manifest first, so that no process takes the rest for a checkpoint."""
    m = manifest(dir, step)
    _unlink(os.path.join(dir, _OWN, "%d.json" % step))
    if m is None:
        return
    sync_dir(os.path.join(dir, _OWN))
    others = {f["path"] for x in manifests(dir)[0] for f in x["files"]}  # a path may be the same for every step
    dirs = set()
    for f in m["files"]:
        if f["path"] not in others:
            path = _inside(dir, f["path"])
            _unlink(path)
            dirs.add(os.path.dirname(path))
    for d in sorted(dirs, key=len, reverse=True):
        _remove_empty(dir, d)


def _remove_empty(top: str, path: str) -> None:
    """Removes a directory below top, and those above it, that are empty."""
    while path.startswith(top.rstrip("/") + "/"):
        _rmdir(path)
        path = os.path.dirname(path)
