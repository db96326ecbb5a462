"""Segments: the files in shared memory that hold one save each, as the worker sees them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import shutil
import stat
import struct
import threading
import time
import weakref
import zlib
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

HEADER = 4096
PAGE = 4096
FREE, WRITING, COMPLETE = 0, 1, 2
DISK = 1  # flag
MAX_META = 16 << 20
_MAGIC = b"DLRSEG01"
_FIELDS = struct.Struct("<8sIIQQqqQQQIIQQQQQQ")  # up to and with `durable`
_CHUNK = 16 << 20  # bytes that are allocated at a time
_STEP = 16 << 20  # bytes that are faulted in at a time: a save waits for one step
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_MAP_FIXED = 0x10
_HUGE = 2 << 20
_HUGE_PATIENCE = 0.03  # seconds for a _CHUNK in huge pages: more, and small ones are there sooner


class Damaged(Exception):
    """A segment that is not what it says."""


class Pending(NamedTuple):
    """A save that the disk still wants."""

    save: str  # its id
    step: int


class Header(NamedTuple):
    state: int
    seq: int
    step: int
    saved_ns: int
    disk: bool
    meta_off: int
    meta_len: int
    meta_crc: int
    fix_off: int
    fix_count: int
    image_off: int
    image_len: int
    released: int
    durable: int

    @property
    def pending(self) -> bool:
        """Whether the disk still wants it."""
        return self.state == COMPLETE and self.disk and self.released < self.seq


def parse_header(b: Any) -> Header:
    """The header of a segment file, from its first 4096 bytes. A file of zeros is free."""
    f = _FIELDS.unpack_from(b, 0)
    if f[0] == bytes(8):
        return Header(FREE, 0, 0, 0, False, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    if f[0] != _MAGIC or f[1] != 1 or f[2] != HEADER or f[3] > COMPLETE:
        raise Damaged("not a segment of version 1")
    if f[3] == COMPLETE and struct.unpack_from("<I", b, 128)[0] != _header_crc(b):
        raise Damaged("the checksum of the header differs")
    return Header(f[3], f[4], f[5], f[6], bool(f[7] & DISK), *f[8:11], *f[12:18])


def _header_crc(b: Any) -> int:
    return zlib.crc32(bytes(b[24:112]), zlib.crc32(bytes(b[:16])))


def parse_meta(b: Any, crc: int) -> Dict[str, Any]:
    """The description of a save."""
    b = bytes(b)
    if zlib.crc32(b) != crc:
        raise Damaged("the checksum of the description differs")
    meta = json.loads(b.decode())
    if not isinstance(meta, dict) or not isinstance(meta.get("save"), str):
        raise Damaged("the description is none")
    return meta


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


class _Libc:
    """The three calls that Python does not offer without a second descriptor: its own mmap duplicates the descriptor,
    and closing the copy would drop the process's lock on the file."""

    def __init__(self) -> None:
        lib = ctypes.CDLL(None, use_errno=True)
        self.mmap = lib.mmap
        self.mmap.restype = ctypes.c_void_p
        self.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        self.munmap = lib.munmap
        self.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.fallocate = lib.fallocate
        self.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
        self.madvise = lib.madvise
        self.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


_libc = _Libc()


class Mapping:
    """Bytes of a file in memory. `view` keeps them mapped, for as long as anything made from it lives."""

    def __init__(self, fd: int, length: int, private: bool = False) -> None:
        addr = _map(fd, length, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
        self.addr: int = addr
        self.length = length
        holder = (ctypes.c_ubyte * length).from_address(addr)
        self.alive = weakref.ref(holder)
        self.registered: Optional[bool] = None  # with CUDA; None: not tried
        self._before: List[Any] = []  # called with the address before it is unmapped
        end = weakref.finalize(holder, _unmap, addr, length, self._before)
        end.atexit = False
        self._holder = holder

    def at_end(self, call: Any) -> None:
        self._before.append(call)

    @property
    def view(self) -> memoryview:
        return memoryview(self._holder).cast("B")

    def populate(self, start: int, end: int) -> bool:
        """Faults pages in for writing, without changing them. False: the kernel cannot. Releases the GIL."""
        start -= start % PAGE
        return not _libc.madvise(self.addr + start, end - start, _POPULATE_WRITE)

    def collapse(self, start: int, nbytes: int) -> bool:
        """Makes huge pages of a range that has some pages. False: the kernel does not."""
        return not _libc.madvise(self.addr + start, nbytes, _COLLAPSE)


def _map(fd: int, length: int, flags: int) -> int:
    """Maps a file where its huge pages can be mapped as such: the address is a multiple of their size."""
    length = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    room = _mmap(None, length + _HUGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    addr = -(-room // _HUGE) * _HUGE
    # If this fails the addresses stay reserved: some of them may be another thread's by now.
    _mmap(addr, length, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, fd)
    for start, end in ((room, addr), (addr + length, room + length + _HUGE)):
        if start < end:
            _libc.munmap(start, end - start)
    return addr


def _mmap(addr: Optional[int], length: int, protection: int, flags: int, fd: int) -> int:
    got = _libc.mmap(addr, length, protection, flags, fd, 0)
    if got in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "map a segment of %d bytes" % length)
    return int(got)


def _unmap(addr: int, length: int, before: List[Any]) -> None:
    for call in before:
        call(addr)
    _libc.munmap(addr, length)


class Loan:
    """A private mapping whose views were given away."""

    def __init__(self, mapping: Mapping) -> None:
        self.alive = mapping.alive
        self._addr = mapping.addr
        self._length = mapping.length

    def free(self) -> bool:
        """Whether no view is left."""
        return self.alive() is None

    def detach(self) -> bool:
        """Makes the views independent of the file: every page is copied. False: this kernel cannot."""
        holder = self.alive()
        return holder is None or not _libc.madvise(self._addr, self._length, _POPULATE_WRITE)


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def open_segment(path: str) -> int:
    """A descriptor of an existing segment file: ours, regular, no link."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    st = os.fstat(fd)
    if not stat.S_ISREG(st.st_mode) or st.st_uid != os.getuid() or st.st_size < HEADER:
        os.close(fd)
        raise Damaged("%s is not a segment of ours" % path)
    return fd


def read_header(fd: int) -> Header:
    return parse_header(os.pread(fd, HEADER, 0))


def read_save(fd: int) -> Tuple[Header, Optional[Dict[str, Any]]]:
    """The header, and the description when the save is complete."""
    h = read_header(fd)
    if h.state != COMPLETE:
        return h, None
    size = os.fstat(fd).st_size
    end = max(h.meta_off + h.meta_len, h.image_off + h.image_len, h.fix_off + 32 * h.fix_count)
    if h.meta_len > MAX_META or end > size:
        raise Damaged("the save does not fit in its file")
    return h, parse_meta(os.pread(fd, h.meta_len, h.meta_off), h.meta_crc)


def lock(fd: int, exclusive: bool) -> bool:
    """Takes the record lock of the whole file. Never waits."""
    try:
        fcntl.lockf(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        return True
    except OSError as e:
        if e.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise


def unlock(fd: int) -> None:
    fcntl.lockf(fd, fcntl.LOCK_UN)


class Buffer:
    """One segment file of this worker, open for writing. There is one descriptor of it in the process: closing
    any other would drop the lock. Its lock is not inherited by a fork, and a child must not use it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = -1
        self.capacity = 0
        self.mapping: Optional[Mapping] = None
        self.loans: List[Loan] = []
        self.filled_by: Any = None  # whose `fresh` bytes lie in it, and where
        self.populated = 0  # bytes that are faulted in
        self.ready = False  # nothing is left to prepare
        self.making = threading.Lock()  # held while a larger file is allocated

    def open(self) -> bool:
        """Takes over the file of a previous incarnation. False: there is none."""
        try:
            self.fd = open_segment(self.path)
        except FileNotFoundError:
            return False
        self.capacity = os.fstat(self.fd).st_size
        return True

    def seq(self) -> int:
        return struct.unpack("<Q", os.pread(self.fd, 8, 24))[0] if self.fd >= 0 else 0

    def make(self, size: int, seq: int) -> int:
        """A descriptor of a new file of this size, still under another name. OSError(ENOSPC): there is no room.
        The numbers go on from seq, so that a name and a number never mean two saves."""
        tmp = self.path + ".new"
        _unlink(tmp)
        fd = os.open(tmp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
            m, huge = Mapping(fd, size), True
            for at in range(0, size, _CHUNK):  # in steps, because a step cannot be interrupted
                n = min(_CHUNK, size - at)
                huge = huge and _take_huge(fd, m, at, n)
                os.posix_fallocate(fd, at, n)
            os.pwrite(fd, _FIELDS.pack(_MAGIC, 1, HEADER, FREE, seq, *([0] * 11), seq, seq), 0)
        except BaseException:
            os.close(fd)
            _unlink(tmp)
            raise
        return fd

    def take(self, fd: int, size: int) -> None:
        """Puts a file that make() returned in the place of this one. Views of a load keep the old one."""
        os.rename(self.path + ".new", self.path)
        self.close()
        self.loans = []
        self.fd, self.capacity = fd, size

    def populate(self, stop: Any) -> bool:
        """Faults in what is not yet, until stop() says so. Returns whether all is."""
        m = self.map()
        while self.populated < m.length and not stop():
            end = min(m.length, self.populated + _STEP)
            if not m.populate(self.populated, end):
                end = m.length  # an old kernel: the first save faults the pages in
            self.populated = end
        return self.populated >= m.length

    def map(self) -> Mapping:
        if self.mapping is None:
            self.mapping = Mapping(self.fd, self.capacity)
        return self.mapping

    def header(self) -> Header:
        return read_header(self.fd)

    def pending(self) -> Optional[Pending]:
        """The save in it that the disk still wants; None: there is none. To be called with the lock."""
        try:
            if self.fd < 0 or not self.header().pending:
                return None
            h, meta = read_save(self.fd)
        except (OSError, Damaged, ValueError):
            return None
        return Pending(meta["save"], h.step) if meta is not None else None

    def lent(self) -> bool:
        """Whether views of a load still need the bytes."""
        self.loans = [x for x in self.loans if not x.free()]
        return bool(self.loans)

    def detach(self) -> bool:
        """Makes the views of a load independent."""
        if all(x.detach() for x in self.loans):
            self.loans = []
        return not self.loans

    def begin(self) -> int:
        """After the lock is taken: from here on what it held is gone. Returns the number of the save."""
        words = self._words()
        words[2] = WRITING
        words[3] += 1
        return words[3]

    def publish(self, step: int, disk: bool, image_len: int, fix: bytes, meta: bytes, begun_ns: int = 0) -> int:
        """Writes the tables behind the image, then the header, and then declares it complete. Returns the time of the save,
        which is not before begun_ns."""
        saved_ns = max(begun_ns, time.time_ns())
        view = self.map().view
        fix_off = HEADER + -(-image_len // 8) * 8
        meta_off = fix_off + len(fix)
        view[fix_off:fix_off + len(fix)] = fix
        view[meta_off:meta_off + len(meta)] = meta
        struct.pack_into("<qqQQQIIQQQQ", view, 32, step, saved_ns, DISK if disk else 0, meta_off, len(meta),
                         zlib.crc32(meta), 0, fix_off, len(fix) // 32, HEADER, image_len)
        struct.pack_into("<I", view, 128, _header_crc(view))
        self._words()[2] = COMPLETE
        return saved_ns

    def abort(self) -> None:
        self._words()[2] = FREE

    def discard(self) -> None:
        """What it held is gone for everyone who has the file open, too. To be called with the lock."""
        os.pwrite(self.fd, struct.pack("<Q", FREE), 16)

    def _words(self) -> memoryview:
        return self.map().view[:HEADER].cast("Q")

    def remove(self) -> None:
        """Gives the memory back. The daemon may have the file mapped for a while: its pages go at once, unless somebody
        reads them."""
        if self.fd >= 0:
            _unlink(self.path)
            if not self.lent() and lock(self.fd, True):
                _libc.fallocate(self.fd, _PUNCH_HOLE, 0, self.capacity)
        self.close()

    def close(self) -> None:
        self.mapping = None
        self.filled_by = None
        self.populated = 0
        self.ready = False
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.capacity = -1, 0


def _take_huge(fd: int, m: Mapping, start: int, nbytes: int) -> bool:
    """Takes memory in huge pages, whatever the system's default for shared memory is: they make copies, page faults, and
    the daemon's writes with O_DIRECT cheaper. False: there are none to be had, or not quickly. OSError(ENOSPC): there is
    no memory at all."""
    nbytes -= nbytes % _HUGE
    for at in range(start, start + nbytes, _HUGE):
        os.pwrite(fd, b"\0", at)  # the kernel makes huge pages only of what has a page
    begin = time.monotonic()
    return not nbytes or m.collapse(start, nbytes) and time.monotonic() - begin < _HUGE_PATIENCE


def room(image_len: int, fixups: int, meta: int) -> int:
    """The size of a file for such a save."""
    return HEADER + image_len + 8 + 32 * fixups + meta


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


# ---------------------------------------------------------------------------------------------------------------------
# Directory and space
# ---------------------------------------------------------------------------------------------------------------------


def runtime_dir(environ: Dict[str, str]) -> Tuple[str, bool]:
    """(runtime directory, whether a launcher gave it). Without a launcher it is made here, named after the parent
    process, so that workers that are started again by the same parent find it; those of dead parents are removed.

    Containers may share the place and not the process numbers: whether a parent in another PID namespace lives cannot be
    seen from here. Its directory goes when no worker has it open and the last one started more than _FOREIGN_AGE ago.
    """
    given = environ.get("DLROVER_CKPT_RUNTIME")
    if given:
        _private_dir(given)
        _private_dir(os.path.join(given, "seg"))
        return given, True
    base = os.path.join(environ.get("DLROVER_CKPT_SHM", "/dev/shm"), "dlrover-%d" % os.getuid())
    _private_dir(base)
    namespace = _pid_namespace()
    _remove_dead(base, namespace)
    ppid = os.getppid()
    own = os.path.join(base, "t%d-%s-%s" % (ppid, _start_time(ppid) or "0", namespace))
    _private_dir(own)
    while not _occupy(own):  # it has just been removed
        _private_dir(own)
    _private_dir(os.path.join(own, "seg"))
    return own, False


_FOREIGN_AGE = 3600.0  # seconds; more than a launcher takes to start workers again

_occupied: Dict[str, int] = {}  # directory -> the descriptor whose shared lock shows that a worker lives


def _occupy(path: str) -> bool:
    """False: the directory is not there."""
    try:
        if path not in _occupied:
            fd = _open_dir(path)
            fcntl.flock(fd, fcntl.LOCK_SH)
            _occupied[path] = fd
        if os.path.samestat(os.stat(path), os.fstat(_occupied[path])):
            os.utime(path)
            return True
    except FileNotFoundError:
        pass
    if path in _occupied:
        os.close(_occupied.pop(path))
    return False


def touch(path: str) -> None:
    """Says that the directory is of use: its age is how long it has been of none."""
    try:
        os.utime(path)
    except OSError:
        pass  # it is only a hint


def _open_dir(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _private_dir(path: str) -> None:
    """Makes the directory, or checks that it is one, ours, and nobody else's to write in."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    st = os.lstat(path)
    if not stat.S_ISDIR(st.st_mode) or st.st_uid != os.getuid() or st.st_mode & 0o077:
        raise PermissionError("%s must be a directory of uid %d that nobody else may enter (mode 0700)"
                              % (path, os.getuid()))


def _start_time(pid: int) -> Optional[str]:
    """When a process started, in clock ticks since boot; None: there is no such process."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def _pid_namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"


def _remove_dead(base: str, namespace: str) -> None:
    for name in os.listdir(base):
        parts = name[1:].split("-")
        if name[:1] != "t" or len(parts) != 3 or not parts[0].isdigit():
            continue
        path = os.path.join(base, name)
        if parts[2] != namespace:
            _remove_abandoned(path)
        elif _start_time(int(parts[0])) != parts[1]:
            shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned(path: str) -> None:
    """Removes a directory that no worker has had open for long."""
    try:
        fd = _open_dir(path)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if time.time() - os.fstat(fd).st_mtime > _FOREIGN_AGE:
            gone = "%s.gone" % path
            os.rename(path, gone)  # whoever waits for the lock finds another directory, or none, under the name
            shutil.rmtree(gone, ignore_errors=True)
    except OSError:
        pass
    finally:
        os.close(fd)


def free_bytes(shm: str) -> int:
    """Bytes that may still be used: the file system's, the machine's and the control group's limits."""
    return max(0, min(n for n, _ in _bounds(shm)))


def remedy(shm: str) -> str:
    """What to do about the limit that leaves the fewest bytes."""
    return min(_bounds(shm), key=lambda bound: bound[0])[1]


def _bounds(shm: str) -> List[Tuple[int, str]]:
    st = os.statvfs(shm)
    return ([(st.f_bavail * st.f_frsize, "make /dev/shm larger, for example with --shm-size")]
            + [(n, "the machine has no more memory: start fewer workers on it") for n in _available()]
            + [(n, "raise the container's limit of memory (docker run --memory, in Kubernetes limits.memory), of which "
                   "/dev/shm is a part; --shm-size does not help") for n in _cgroup_free()])


def _available() -> List[int]:
    try:
        with open("/proc/meminfo") as f:
            return [int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable:")]
    except OSError:
        return []


def _cgroup_free() -> List[int]:
    out = []
    try:
        with open("/proc/self/cgroup") as f:
            lines = [line.rstrip("\n").split(":", 2) for line in f]
    except OSError:
        return []
    for _, controllers, path in lines:
        if controllers == "":
            root, limit, usage = "/sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = [p for p in path.split("/") if p]
        for n in range(len(parts), -1, -1):
            d = os.path.join(root, *parts[:n])
            bound, used = _number(os.path.join(d, limit)), _number(os.path.join(d, usage))
            if bound is not None and used is not None and bound < 1 << 60:
                out.append(bound - used + _reclaimable(os.path.join(d, "memory.stat")))
    return out


def _reclaimable(path: str) -> int:
    """Page cache that the kernel gives back when somebody needs memory."""
    try:
        with open(path) as f:
            stats = dict(line.split() for line in f)
    except (OSError, ValueError):
        return 0
    return int(stats.get("total_inactive_file", stats.get("inactive_file", 0)))


def _number(path: str) -> Optional[int]:
    try:
        with open(path) as f:
            return int(f.read())
    except (OSError, ValueError):
        return None
