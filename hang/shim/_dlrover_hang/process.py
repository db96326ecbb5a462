"""What the kernel says of processes."""

from __future__ import annotations

import os
from typing import List, Mapping

_PR_SET_PTRACER = 0x59616D61


_HERE = os.path.dirname(__file__)


def unless_ours(e: BaseException) -> None:
    """Raises an exception again that no code of this package has raised: a signal handler of the job has, while that
    ran."""
    at = e.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is not None and os.path.dirname(at.tb_frame.f_code.co_filename) != _HERE:
        raise e


def start(pid: int) -> int:
    """When a process began, in clock ticks since the boot; 0: there is no such process."""
    return _stat(pid)[1]


def parent(pid: int) -> int:
    """The parent of a process; 0: there is no such process, or it has none."""
    return _stat(pid)[0]


def _stat(pid: int) -> List[int]:
    """The parent and the start of a process that is not a zombie, or zeros."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X"):
            return [0, 0]
        return [int(fields[1]), int(fields[19])]
    except (OSError, ValueError, IndexError):
        return [0, 0]


def descends(pid: int, ancestor: int) -> bool:
    """Whether a process is a descendant of another one."""
    for _ in range(1000):  # there is no circle, but what is read changes
        pid = parent(pid)
        if pid == ancestor or pid <= 1:
            return pid == ancestor
    return False


def allow_tracer(env: Mapping[str, str]) -> None:
    """Lets the process that DLROVER_HANG_TRACER names read this one's memory, where Yama asks for that."""
    try:
        import ctypes

        pid = int(env.get("DLROVER_HANG_TRACER", ""))
        if pid > 0:
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
    except Exception:
        pass  # no number, or no libc that can be opened


def name_thread(name: str) -> None:
    """Gives this thread a name for the tools that list threads."""
    try:
        with open("/proc/self/task/%d/comm" % tid(), "w") as f:
            f.write(name)
    except Exception:
        pass


def tid() -> int:
    """The kernel's id of this thread."""
    import _thread

    return _thread.get_native_id()
