"""The standard streams, once their descriptors are others."""

import io
import sys


def renew():
    """Makes the objects anew in their places, for modules keep them, as the interpreter makes them at its start."""
    for fd, name, stream in ((0, "<stdin>", sys.__stdin__), (1, "<stdout>", sys.__stdout__),
                             (2, "<stderr>", sys.__stderr__)):
        _renew(fd, name, stream)


def _renew(fd, name, stream):
    encoding, errors, unbuffered, buffer = stream.encoding, stream.errors, stream.write_through, stream.buffer
    raw = io.FileIO(fd, "rb" if fd == 0 else "wb", closefd=False)  # it remembers whether the descriptor can seek
    raw.name = name
    if isinstance(buffer, io.FileIO):
        buffer = raw
    else:
        size = raw._blksize
        if sys.version_info >= (3, 14):
            size = max(min(size, 8 << 20), io.DEFAULT_BUFFER_SIZE)
        buffer.__init__(raw, size)
    lines = not unbuffered and (raw.isatty() or fd == 2 and sys.version_info >= (3, 9))
    stream.__init__(buffer, encoding, errors, "\n", lines, unbuffered)
    stream.mode = "r" if fd == 0 else "w"
