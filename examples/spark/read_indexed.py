"""Reads and checks a data set in Megatron's indexed format, PREFIX.bin and PREFIX.idx.

    python read_indexed.py PREFIX [DOCUMENT ...]

The index has, in little endian: the bytes MMIDIDX and two zeros; version 1, of 8 bytes; the code of the tokens' type,
of 1 byte; the number of sequences and of document bounds, of 8 bytes each; the length of every sequence in tokens, of 4
bytes; its offset in PREFIX.bin, of 8 bytes; the bounds, of 8 bytes: document n has the sequences from bound n on, and
before bound n + 1. PREFIX.bin has the tokens alone.
"""
import itertools
import mmap
import os
import struct
import sys
from array import array

MAGIC = b"MMIDIDX\0\0"
# The array type of a code. 6 and 7 are floats, which are no tokens.
TYPES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


class Indexed:
    """A data set. Its documents are lists of sequences, which are arrays of tokens."""

    def __init__(self, prefix):
        with open(prefix + ".idx", "rb") as f:
            data = f.read()
        head = struct.calcsize("<9sQBQQ")
        if len(data) < head:
            raise ValueError("%s.idx has %d bytes, fewer than a header" % (prefix, len(data)))
        magic, version, self.code, sequences, bounds = struct.unpack_from("<9sQBQQ", data)
        if magic != MAGIC or version != 1 or self.code not in TYPES:
            raise ValueError("%s.idx begins with %r, version %d, type %d: want %r, 1, and one of %s" % (
                prefix, magic, version, self.code, MAGIC, sorted(TYPES)))
        if len(data) != head + 12 * sequences + 8 * bounds:
            raise ValueError("%s.idx has %d bytes, and its header asks for %d" % (
                prefix, len(data), head + 12 * sequences + 8 * bounds))
        self.lengths = numbers("i", data[head:head + 4 * sequences])
        self.offsets = numbers("q", data[head + 4 * sequences:head + 12 * sequences])
        self.bounds = numbers("q", data[head + 12 * sequences:])
        self.size = array(TYPES[self.code]).itemsize
        self.check(prefix)
        with open(prefix + ".bin", "rb") as f:
            self.tokens = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) if self.lengths else b""

    def check(self, prefix):
        ends = list(itertools.accumulate(n * self.size for n in self.lengths))
        if list(self.offsets) != [0, *ends][:len(self.lengths)]:
            raise ValueError("%s.idx: the offsets do not follow from the lengths" % prefix)
        there, want = os.path.getsize(prefix + ".bin"), ends[-1] if ends else 0
        if there != want:
            raise ValueError("%s.bin has %d bytes, and the index asks for %d" % (prefix, there, want))
        if self.bounds[:1] != array("q", [0]) or self.bounds[-1] != len(self.lengths) or \
                any(a > b for a, b in zip(self.bounds, self.bounds[1:])):
            raise ValueError("%s.idx: the bounds do not rise from 0 to %d" % (prefix, len(self.lengths)))

    def __len__(self):
        return len(self.bounds) - 1

    def __getitem__(self, n):
        if not 0 <= n < len(self):
            raise IndexError("document %d of %d" % (n, len(self)))
        return [numbers(TYPES[self.code], self.tokens[at:at + length * self.size]) for at, length in zip(
            self.offsets[self.bounds[n]:self.bounds[n + 1]], self.lengths[self.bounds[n]:self.bounds[n + 1]])]


def numbers(kind, data):
    out = array(kind)
    out.frombytes(data)
    if sys.byteorder == "big":
        out.byteswap()
    return out


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    data = Indexed(sys.argv[1])
    print("%d documents, %d sequences, %d tokens of type %d" % (
        len(data), len(data.lengths), sum(data.lengths), data.code))
    for n in sys.argv[2:]:
        print(n, [list(sequence) for sequence in data[int(n)]])


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, IndexError) as e:
        sys.exit("read_indexed.py: %s" % e)
