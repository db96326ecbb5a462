"""What /proc/PID/cmdline and /proc/PID/environ show."""

import ctypes
import mmap
import os
import struct

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_kept = []  # memory that the kernel shows


def show(argv, env):
    """Shows the words of a command line and the entries of an environment, all bytes. Where the kernel cannot be told
    another place (no CONFIG_CHECKPOINT_RESTORE), what fits is written over what was there at the start."""
    argv, env = b"".join(w + b"\0" for w in argv), b"".join(e + b"\0" for e in env)
    try:
        _move(argv, env)
    except (OSError, ValueError):
        try:
            _overwrite(argv, env)
        except (OSError, ValueError):
            pass


_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p


def _fields():
    with open("/proc/self/stat", "rb") as f:
        fields = f.read().rpartition(b")")[2].split()
    return [0] + [int(x) for x in fields[1:]]


def _move(argv, env):
    page = mmap.mmap(-1, len(argv) + len(env) + 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page.write(argv + env)
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    _kept.append(page)
    f = _fields()
    start_code, end_code, start_stack = f[23], f[24], f[25]
    start_data, end_data, start_brk = f[42], f[43], f[44]
    brk = _libc.sbrk(ctypes.c_long(0))
    arg_end = start + len(argv)
    map = struct.pack("=12QIi", start_code, end_code, start_data, end_data, start_brk, brk, start_stack,
                      start, arg_end, arg_end, arg_end + len(env), 0, 0, -1)
    buffer = ctypes.create_string_buffer(map, len(map))
    if _libc.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), ctypes.byref(buffer), ctypes.c_ulong(len(map)),
                  ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), "prctl")


def _overwrite(argv, env):
    for name, value in os.environb.items():
        os.putenv(name, value)  # what C reads may still be there
    f = _fields()
    with open("/proc/self/mem", "r+b", 0) as memory:
        for start, end, text in ((f[45], f[46], argv), (f[47], f[48], env)):
            if end > start:
                memory.seek(start)
                memory.write(text[:end - start - 1].ljust(end - start, b"\0"))
