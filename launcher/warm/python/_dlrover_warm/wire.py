"""Messages to and from the launcher: a packet is one JSON object, with descriptors beside it."""

import array
import json
import os
import select
import socket

VERSION = 1
_MAX = 64 << 10  # bytes of a packet
_FDS = 8  # descriptors with a packet


class Wire:
    """One end of a connection of packets."""

    def __init__(self, fd):
        """Owns the descriptor from now on."""
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._socket.set_inheritable(False)

    def fileno(self):
        return self._socket.fileno()

    def close(self):
        self._socket.close()

    def send(self, message, *fds):
        """Raises OSError when nobody reads."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.sendmsg([json.dumps(message).encode()], rights, socket.MSG_NOSIGNAL)

    def readable(self, timeout):
        """Whether there is a packet, or the end, within seconds."""
        return bool(select.select([self._socket], [], [], timeout)[0])

    def receive(self):
        """Waits for a packet, and returns the message with the descriptors, which are the caller's; None, []: the
        other end is closed. Raises ValueError for what is no message, and OSError."""
        fds = array.array("i")
        space = socket.CMSG_SPACE(_FDS * fds.itemsize)
        packet, controls, flags, _ = self._socket.recvmsg(_MAX, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in controls:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[:len(data) - len(data) % fds.itemsize])
        if not packet:
            close(fds)
            return None, []
        try:
            message = json.loads(packet.decode())
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not isinstance(message, dict):
                raise ValueError("a packet is cut off, or no object")
        except ValueError:
            close(fds)
            raise
        return message, list(fds)


def close(fds):
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass


def load(fd):
    """The JSON object that a file holds; the descriptor is closed. Raises ValueError or OSError."""
    with open(fd, "rb") as f:
        f.seek(0)
        value = json.loads(f.read().decode("utf-8"))
    if not isinstance(value, dict):
        raise ValueError("the file holds no object")
    return value


def store(value):
    """A descriptor of a file in memory that holds a value as JSON."""
    fd = memfd("dlrover-warm")
    try:
        with open(fd, "wb", closefd=False) as f:
            f.write(json.dumps(value).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        return fd
    except BaseException:
        os.close(fd)
        raise


def memfd(name):
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    import tempfile  # a CPython that was built for an older libc

    with tempfile.TemporaryFile() as f:
        return os.dup(f.fileno())
