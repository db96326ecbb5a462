"""Pages that forks come to write: a copy of each takes 5 to 10 us, which a worker should not spend when it is waited
for."""

import array
import ctypes
import io
import os
import sys

from . import check, wire

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PRESENT, _OF_FILE, _ALONE = 1 << 63, 1 << 61, 1 << 56  # in an entry of /proc/self/pagemap
_POPULATE_WRITE = 23  # advice to the kernel since Linux 5.14; an older one refuses it
_MOST = 64 << 20  # bytes that are copied for one fork
_LOOKED_AT = 1 << 20  # pages of one mapping


def written(prepare, deadline, called_off):
    """The runs of pages, as addresses and lengths in turns, that a fork of this process has copies of after steps like
    those of a training. Empty: that did not work, or there is no PyTorch; None: called_off, a file, could
    be read before that."""
    if "torch" not in sys.modules:
        return array.array("Q")
    file = wire.memfd("dlrover-warm-pages")

    def in_fork():
        prepare()
        check.compute()
        _train(sys.modules["torch"])
        os.write(file, copied().tobytes())

    try:
        with check.Trial(in_fork) as trial:
            why = trial.fails(deadline, [called_off])
        if why:
            return None if why == check.CALLED_OFF else array.array("Q")
        os.lseek(file, 0, os.SEEK_SET)
        with open(file, "rb", closefd=False) as f:
            return array.array("Q", f.read())
    finally:
        os.close(file)


def _train(torch):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    model.load_state_dict(torch.load(file)["model"])


def copied():
    """The runs of pages of private memory that no other process shares."""
    runs, left = array.array("Q"), _MOST // _PAGE
    for begin, entries in _private():
        at = 0
        for i, entry in enumerate(entries):
            if entry & (_PRESENT | _OF_FILE | _ALONE) != _PRESENT | _ALONE or left == 0:
                continue
            left -= 1
            if at and at == i:
                runs[-1] += _PAGE
            else:
                runs.extend((begin + i * _PAGE, _PAGE))
            at = i + 1
    return runs


def _private():
    """The address and the pages' entries of each private mapping that can be written."""
    with open("/proc/self/maps") as f:
        mappings = [line.split(None, 2)[:2] for line in f]
    with open("/proc/self/pagemap", "rb", buffering=0) as f:
        for span, rights in mappings:
            begin, end = (int(x, 16) for x in span.split("-"))
            if rights == "rw-p":
                n = min((end - begin) // _PAGE, _LOOKED_AT)
                yield begin, array.array("Q", os.pread(f.fileno(), 8 * n, begin // _PAGE * 8))


def copy(runs):
    """Gives this process its copies of these pages. Those that it does not have are left out."""
    advise = ctypes.CDLL(None).madvise
    for begin, length in zip(runs[::2], runs[1::2]):
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _POPULATE_WRITE)
