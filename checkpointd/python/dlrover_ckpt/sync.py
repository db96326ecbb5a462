"""Checkpoint directories without a daemon: writing a save, finishing interrupted ones, and finding the newest good one.

Order of a save: the list of temporary files; the temporary files, durable; "prepared" of every shard; the intent, from
which there is only forward; the final names; "placed" of every shard; the manifest; the trackers. Nothing is ever
written in place, and no link is followed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import posixpath
import struct
import time
import zlib
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from .image import Image

LATEST = "dlrover_latest.txt"
_OWN = ".dlrover"
_BLOCK = 8 << 20  # bytes that are written or checked at a time
_STALE = 3600  # seconds after which nobody works on a stage any more


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


def _read_json(path: str) -> Any:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as f:
        return json.loads(f.read().decode())


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


def still_there(dir: str) -> None:
    """OSError: what was committed to the directory is gone, as when its storage is no longer mounted."""
    own = os.path.join(dir, _OWN)
    if not os.path.isdir(own):
        raise OSError(errno.ENOENT, "%s has none of the checkpoints that were committed to it: mount it, or make %s to "
                                    "begin anew" % (dir, own))


def write_shard(meta: Dict[str, Any], images: Sequence[Image]) -> List[Dict[str, Any]]:
    """Makes this shard's files durable under temporary names, and says so. Returns the file entries."""
    dir, save, shard = meta["dir"], meta["save"], meta["shard"]
    paths = [_inside(dir, i.path) for i in images]
    stage = _stage(dir, save)
    _write_json(os.path.join(stage, "shard-%d.plan" % shard), [temporary(p, save) for p in paths])
    for d in (os.path.dirname(stage), os.path.join(dir, _OWN), dir):  # without these names nobody finds the plan
        sync_dir(d)
    files = []
    for image, path in zip(images, paths):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        tmp = temporary(path, save)
        crc = write_image(tmp, image)
        files.append({"path": image.path, "size": image.length, "crc32": crc, "shard": shard, "tmp": tmp})
    for d in sorted({os.path.dirname(p) for p in paths}):
        sync_dir(d)
    _write_json(os.path.join(stage, "shard-%d.prepared" % shard), {"shard": shard, "files": files})
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
        data.keep = copy
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
           agree: Optional[Callable[[Any], List[Any]]], deadline: float) -> None:
    """Takes a written shard to its final name and, as shard 0, publishes the save. SaveFailed: it is given up.

    files: this shard's entries, empty for a process that writes no shard.
    write_error: why they could not be written, "" = they are.
    agree: gathers a value from all processes; None: the marker files are watched until the deadline.
    """
    dir, save = meta["dir"], meta["save"]
    writer = meta["primary"]
    lead = writer and meta["shard"] == 0
    stage = _stage(dir, save)
    if agree is not None:
        errors = [e for e in agree(write_error) if e]
        if errors:
            if writer:
                abandon(dir, save, meta["shard"])
            raise SaveFailed("step %d was not saved: %s" % (meta["step"], errors[0]))
    elif write_error:
        abandon(dir, save, meta["shard"])
        raise SaveFailed("step %d was not saved: %s" % (meta["step"], write_error))

    def meet(marker: str, shards: bool) -> None:
        names = ["shard-%d.%s" % (i, marker) for i in range(meta["shards"])] if shards else [marker]
        if agree is not None:
            agree(None)
        else:
            _watch(stage, names, lambda: _published(dir, meta), deadline)

    if lead:
        if agree is None and meta["shards"] > 1:
            meet("prepared", True)
        entries = [_read_json(os.path.join(stage, "shard-%d.prepared" % i)) for i in range(meta["shards"])]
        _write_json(os.path.join(stage, "intent"), _manifest(meta, [f for e in entries for f in e["files"]]))
    if agree is not None or (writer and not lead):
        meet("intent", False)
    if writer:
        place(dir, files)
        _write_json(os.path.join(stage, "shard-%d.placed" % meta["shard"]), {})
    if agree is not None or lead:
        if agree is not None or meta["shards"] > 1:
            meet("placed", True)
    if lead:
        publish(dir, _read_json(os.path.join(stage, "intent")))
        retain(dir)
    if agree is not None:
        agree(None)


def _manifest(meta: Dict[str, Any], files: List[Dict[str, Any]]) -> Dict[str, Any]:
    return {"version": 1, "step": meta["step"], "save": meta["save"], "epoch": meta["epoch"],
            "shards": meta["shards"], "world_size": meta["world_size"], "framework": meta["framework"],
            "layout": meta["layout"], "saved_ns": meta["saved_ns"], "committed_ns": 0, "files": files,
            "trackers": meta["trackers"], "retention": meta["retention"]}


def _watch(stage: str, names: List[str], done: Callable[[], bool], deadline: float) -> None:
    pause = 0.02
    while not all(os.path.exists(os.path.join(stage, n)) for n in names):
        if done():
            return
        if time.monotonic() > deadline:
            missing = [n for n in names if not os.path.exists(os.path.join(stage, n))]
            raise SaveFailed("waited in vain for %s in %s" % (missing[0], stage))
        time.sleep(pause)
        pause = min(0.5, pause * 1.5)


def _published(dir: str, meta: Dict[str, Any]) -> bool:
    m = manifest(dir, meta["step"])
    return m is not None and m["save"] == meta["save"]


def _stage(dir: str, save: str) -> str:
    return os.path.join(dir, _OWN, "stage", save)


def place(dir: str, files: Iterable[Dict[str, Any]]) -> None:
    """Gives files their final names, durably. SaveFailed: neither the temporary file nor a final one of that size."""
    dirs = set()
    for f in files:
        path = _inside(dir, f["path"])
        try:
            os.rename(f["tmp"], path)
        except FileNotFoundError:
            if not os.path.isfile(path) or os.path.getsize(path) != f["size"]:
                raise SaveFailed("%s is neither under its temporary nor under its final name" % path) from None
        dirs.add(os.path.dirname(path))
    for d in sorted(dirs):
        sync_dir(d)


def publish(dir: str, m: Dict[str, Any]) -> None:
    """Manifest, trackers, and the end of the stage. The trackers stay when they name a newer save of this epoch."""
    m = dict(m, files=[{k: v for k, v in f.items() if k != "tmp"} for f in m["files"]])
    step = tracked(dir)
    newer = manifest(dir, step) if step is not None else None
    moves = newer is None or newer["epoch"] != m["epoch"] or newer["saved_ns"] <= m["saved_ns"]
    m["committed_ns"] = time.time_ns()
    if not moves:  # of the same time, what was made last is the newest
        later = [x["committed_ns"] for x in manifests(dir)[0] if x["epoch"] == m["epoch"] and x["saved_ns"] > m["saved_ns"]]
        m["committed_ns"] = min(later + [newer["committed_ns"]])
    _write_json(os.path.join(dir, _OWN, "%d.json" % m["step"]), m)
    if moves:
        for t in m["trackers"]:
            write_small(_inside(dir, t["path"]), t["text"].encode())
    _remove_stage(dir, m["save"])


def abandon(dir: str, save: str, shard: int) -> None:
    """Removes what a shard has written so far."""
    stage = _stage(dir, save)
    plan = os.path.join(stage, "shard-%d.plan" % shard)
    for tmp in _planned(plan, save):
        _unlink(tmp)
    for name in ("prepared", "plan"):
        _unlink(os.path.join(stage, "shard-%d.%s" % (shard, name)))
    _rmdir(stage)


def _planned(plan: str, save: str) -> List[str]:
    """The temporary files of a plan; only such as carry the name of the save."""
    try:
        tmps = _read_json(plan)
    except (OSError, ValueError):
        return []
    return [t for t in tmps if isinstance(t, str) and os.path.basename(t).endswith(".%s.tmp" % save)]


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
    """Completes saves that were interrupted after their intent, and removes old ones that were before it.
    Returns what could not be completed, as sentences."""
    problems = []
    root = os.path.join(dir, _OWN, "stage")
    newest = max((m["saved_ns"] for m in manifests(dir)[0]), default=0)
    for save in _list(root):
        stage = os.path.join(root, save)
        try:
            m = _read_json(os.path.join(stage, "intent"))
        except FileNotFoundError:
            _remove_abandoned(dir, save, newest)
            continue
        except (OSError, ValueError) as e:
            problems.append("the intent of save %s cannot be read: %s" % (save, e))
            continue
        try:
            place(dir, m["files"])
            publish(dir, m)
        except (OSError, ValueError, KeyError, SaveFailed) as e:
            problems.append("step %s cannot be completed: %s" % (m.get("step"), e))
    return problems


def _remove_abandoned(dir: str, save: str, newest_ns: int) -> None:
    stage = _stage(dir, save)
    try:
        mtime = os.stat(stage).st_mtime
    except FileNotFoundError:
        return
    if mtime > time.time() - _STALE and mtime * 1e9 >= newest_ns:
        return  # perhaps somebody is writing it right now
    for name in _list(stage):
        if name.endswith(".plan"):
            for tmp in _planned(os.path.join(stage, name), save):
                _unlink(tmp)
    _remove_stage(dir, save)


def tracked(dir: str) -> Optional[int]:
    """The step that the tracker names."""
    try:
        with open(os.path.join(dir, LATEST)) as f:
            return int(f.read(64).strip())
    except (OSError, ValueError):
        return None


def tracker_mtime_ns(dir: str) -> int:
    try:
        return os.stat(os.path.join(dir, LATEST)).st_mtime_ns
    except OSError:
        return 0


def manifest_mtime_ns(dir: str, step: int) -> int:
    try:
        return os.stat(os.path.join(dir, _OWN, "%d.json" % step)).st_mtime_ns
    except OSError:
        return 0


def manifest(dir: str, step: int) -> Optional[Dict[str, Any]]:
    """The manifest of a committed step; None: there is none that can be read."""
    try:
        return _checked(_read_json(os.path.join(dir, _OWN, "%d.json" % step)), step)
    except (OSError, ValueError):
        return None


def manifests(dir: str) -> Tuple[List[Dict[str, Any]], List[str]]:
    """All manifests, the newest commit first, and what is wrong with those that cannot be read."""
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


def _checked(m: Any, step: int) -> Dict[str, Any]:
    kinds = (("version", int), ("step", int), ("save", str), ("epoch", str), ("shards", int), ("world_size", int),
             ("saved_ns", int), ("committed_ns", int), ("files", list))
    if not isinstance(m, dict) or any(not isinstance(m.get(k), t) for k, t in kinds) or m["step"] != step:
        raise ValueError("not a manifest of step %d" % step)
    return m


def verify(dir: str, m: Dict[str, Any], shards: Optional[Sequence[int]] = None) -> str:
    """Reads the files of a manifest (of these shards, None: all). Returns what is wrong, "" when nothing is."""
    for f in m["files"]:
        if shards is not None and f["shard"] not in shards:
            continue
        try:
            path = _inside(dir, f["path"])
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
    """Removes a committed step: the manifest first, so that nobody takes the rest for a checkpoint."""
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
        while d.startswith(dir.rstrip("/") + "/"):
            _rmdir(d)
            d = os.path.dirname(d)
