"""Images: files described as literal bytes plus tensor storages, before a single tensor byte has been copied.

An image is the content of a future file. The engine copies it into shared memory (or, without room there, into a file).
The process that writes it to disk fills in the checksums.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
import sys
import zlib
from operator import attrgetter
from typing import Any, Dict, List, Optional, Sequence, Tuple

Fixup = Tuple[int, int, int, int]

PAGE = 4096
_ALIGN = 64  # bytes; the alignment of torch.save
_BIG = 1 << 20  # from this size on, payloads are page aligned
_MAX32 = 0xFFFFFFFF
_PKL = b"archive/data.pkl"


class Image:
    """One file to be. All offsets count from the start of the file.

    path     relative to the checkpoint directory, or absolute
    kind     "torchzip", "distcp", "safetensors" or "raw"
    length   bytes of the whole file
    pieces   [(offset, bytes)]: literal bytes
    tensors  [(offset, nbytes, storage)]: untyped storages, of any device, whose first nbytes go there
    fixups   [(payload_off, payload_len, dst1, dst2)], ascending and without overlap: the CRC-32 of the payload goes to
             dst1 and dst2 as 32-bit little endian; 0 = nowhere
    layout   the structure in short (names, shapes, dtypes); equal layouts mean interchangeable files

    A byte that neither a piece nor a tensor covers is zero.
    """

    def __init__(self, path: str, kind: str, length: int = 0, pieces: Optional[List[Tuple[int, bytes]]] = None,
                 tensors: Optional[List[Tuple[int, int, Any]]] = None, fixups: Optional[List[Fixup]] = None,
                 layout: str = "") -> None:
        self.path = path
        self.kind = kind
        self.length = length
        self.pieces = pieces if pieces is not None else []
        self.tensors = tensors if tensors is not None else []
        self.fixups = fixups if fixups is not None else []
        self.layout = layout

    def plan(self) -> "Plan":
        """The memory to copy into a file, by offset."""
        fresh = _gaps(self.length, self.pieces, self.tensors)
        sources = [(o, n, s.data_ptr(), None if s.device.type == "cpu" else s) for o, n, s in self.tensors if n]
        return Plan(None, fresh, self.pieces, sources, [], self.fixups, self.tensors)


class Plan:
    """An image as addresses.

    key      the owner of the layout, None = it is made once. While the key is the same object, so are fresh, fixed,
             and (without devices) sources
    fresh    [(offset, bytes)]: bytes that depend on the layout alone
    pieces   [(offset, bytes)]: bytes that change with every save
    sources  [(offset, nbytes, address, storage)]: memory to copy; on the CPU the storage is not one
    fixed    the fix-ups that depend on the layout alone, followed by the others in
    fixups
    keep     objects that must stay alive until the copy is done
    """

    __slots__ = ("key", "fresh", "pieces", "sources", "fixed", "fixups", "keep")

    def __init__(self, key: Any, fresh: List[Tuple[int, bytes]], pieces: List[Tuple[int, bytes]],
                 sources: Sequence[tuple], fixed: List[Fixup], fixups: List[Fixup], keep: Any) -> None:
        self.key = key
        self.fresh = fresh
        self.pieces = pieces
        self.sources = sources
        self.fixed = fixed
        self.fixups = fixups
        self.keep = keep

    def on_device(self) -> List[tuple]:
        """The sources that are not in this process's own memory."""
        if self.key is not None and not self.key.foreign:
            return []
        return [s for s in self.sources if s[3] is not None]


def _gaps(length: int, pieces: Sequence[Tuple[int, bytes]], tensors: Sequence[tuple]) -> List[Tuple[int, bytes]]:
    """Zero bytes for the holes: a reused buffer holds old bytes there."""
    spans = sorted([(o, len(b)) for o, b in pieces] + [(t[0], t[1]) for t in tensors])
    out, end = [], 0
    for off, n in spans:
        if off > end:
            out.append((end, bytes(off - end)))
        end = max(end, off + n)
    if length > end:
        out.append((end, bytes(length - end)))
    return out


def raw(path: str, data: Any, kind: str = "raw") -> Image:
    """An image of literal bytes."""
    data = bytes(data)
    return Image(path, kind, len(data), [(0, data)], layout="%s:%d" % (kind, len(data)))


# ---------------------------------------------------------------------------------------------------------------------
# torch.save's zip format
# ---------------------------------------------------------------------------------------------------------------------


def torch_zip(path: str, obj: Any, cache: Optional[dict] = None) -> Image:
    """The file of torch.save(obj, path), as an image; torch.load reads it, also weights_only and mmap.

    cache: a dict that the caller keeps between saves of the same thing. While only tensor contents and plain values
    change, the layout is reused. Objects that only torch.save can pickle are saved by it, into bytes. The tensors must
    not change before the image has been saved.
    """
    try:
        return _ZipImage(path, *_layout(obj, {} if cache is None else cache))
    except Exception:
        import torch

        buf = io.BytesIO()
        torch.save(obj, buf)  # raises the exception that torch would have raised
        return raw(path, buf.getbuffer(), "torchzip")


class _ZipImage(Image):
    """A torch zip whose lists are made on demand: a save uses the plan."""

    def __init__(self, path: str, zip_: "_Zip", pickled: bytes, layout: str, keep: "_Keep") -> None:
        self.path = path
        self.kind = "torchzip"
        self.length = zip_.length
        self.layout = layout
        self._zip = zip_
        self._keep = keep
        self._tail = zip_.tail(pickled)
        self._last = zip_.last_fixup(len(pickled))

    def plan(self) -> Plan:
        z = self._zip
        sources: Sequence[tuple] = z.sources
        if z.foreign:
            held = self._keep.storages(z)
            sources = [(o, n, a, None if held[i].device.type == "cpu" else held[i])
                       for (o, n, a, _), i in zip(sources, z.which)]
        return Plan(z, z.fresh, self._tail, sources, z.fixups, [self._last], self._keep)

    @property
    def pieces(self) -> List[Tuple[int, bytes]]:  # type: ignore[override]
        return self._zip.fresh + self._tail

    @property
    def tensors(self) -> List[Tuple[int, int, Any]]:  # type: ignore[override]
        held = self._keep.storages(self._zip)
        return [(o, n, held[i]) for (o, n, _, _), i in zip(self._zip.sources, self._zip.which)]

    @property
    def fixups(self) -> List[Fixup]:  # type: ignore[override]
        return self._zip.fixups + [self._last]


class _Keep:
    """The owners of the bytes: the tensors of this save, and its storages if they are known already."""

    def __init__(self, tensors: List[Any], storages: Optional[List[Any]] = None, also: Any = None) -> None:
        self.tensors = tensors
        self._storages = storages
        self._also = also

    def storages(self, zip_: "_Zip") -> List[Any]:
        return self._storages or [_untyped(self.tensors[i]) for i in zip_.owners]


def _layout(obj: Any, cache: dict) -> Tuple["_Zip", bytes, str, _Keep]:
    """The layout comes from the cache when nothing but contents and plain values has changed."""
    known = cache.get("zip")
    if known is None:
        return _fresh_layout(obj, cache)
    scan = _Scan(hasty=True)
    outer = scan.dump(obj)
    repeats = len(set(map(id, scan.tensors))) < len(scan.tensors)
    if scan.storages or repeats or not known.facts.same(scan.tensors):
        return _fresh_layout(obj, cache)
    if outer != known.outer:
        pickled = _splice(outer, known.fragments)
        if len(pickled) > known.zip.room:
            return _fresh_layout(obj, cache)
        known.outer, known.pickled = outer, pickled
        if scan.names != known.names:
            known.names, known.layout = scan.names, _digest(scan.names, known.fragments)
    return known.zip, known.pickled, known.layout, _Keep(scan.tensors)


def _fresh_layout(obj: Any, cache: dict) -> Tuple["_Zip", bytes, str, _Keep]:
    cache.pop("zip", None)
    scan = _Scan()
    outer = scan.dump(obj)
    odd = not all(map(_plain, scan.tensors))
    if odd:  # those are pickled by their own __reduce_ex__
        scan = _Scan(odd=True)
        outer = scan.dump(obj)
    book = scan.book
    fragments = [_fragment(i, t, book) for i, t in enumerate(scan.tensors)]
    pickled = _splice(outer, _with_repeats(scan, fragments))
    zip_ = _Zip(book, len(pickled))
    layout = _digest(scan.names, fragments)
    if not odd and not scan.storages and not scan.repeats:
        cache["zip"] = _Known(zip_, _Facts(scan.tensors), outer, fragments, pickled, scan.names, layout)
    return zip_, pickled, layout, _Keep(scan.tensors, book.kept, scan.storages)


def _digest(names: List[str], fragments: List[bytes]) -> str:
    h = hashlib.sha256("\0".join(names).encode("utf-8", "surrogatepass"))
    h.update(b"".join(fragments))
    return h.hexdigest()[:32]


class _Known:
    """The cached result of the last call. It holds no tensor: only facts about them."""

    __slots__ = ("zip", "facts", "outer", "fragments", "pickled", "names", "layout")

    def __init__(self, zip_: "_Zip", facts: "_Facts", outer: bytes, fragments: List[bytes], pickled: bytes,
                 names: List[str], layout: str) -> None:
        self.zip = zip_
        self.facts = facts
        self.outer = outer
        self.fragments = fragments
        self.pickled = pickled
        self.names = names
        self.layout = layout


# Tensors are left out of the pickle: each leaves this mark, and its own bytes are put there afterwards. It is drawn at
# random in this process, and short because it is written for each tensor. Should other data contain it, the number of
# marks is wrong, and torch.save does the work.
_MARK = int.from_bytes(os.urandom(4), "little") >> 2 | 1 << 30
_MARK_BYTES = pickle.dumps(_MARK, 2)[2:-1] + pickle.BINPERSID

# Memo slots below this number belong to the tensors' bytes; the pickler counts from here.
_RESERVED = 96
_SLOT_HOLDERS = tuple(object() for _ in range(_RESERVED))


class _Scan:
    """One pickling (protocol 2, as torch.save) of an object with its tensors left out.

    odd     only plain tensors are left out
    hasty   repeats are not looked for: a tensor that occurs again is listed again
    """

    def __init__(self, odd: bool = False, hasty: bool = False) -> None:
        self.tensors: List[Any] = []  # distinct and in order
        self.repeats: Dict[int, int] = {}  # position of a mark -> index of the tensor that it repeats
        self.storages: List[Any] = []  # those that were met outside of tensors
        self.names: List[str] = []
        self.memo_size = 0
        self.book = _Book()
        self._odd = odd
        self._hasty = hasty
        self._seen: Dict[int, int] = {}

    def dump(self, obj: Any) -> bytes:
        out = io.BytesIO()
        pickler = self._pickler()(out, 2)
        pickler.memo = {id(o): (i, o) for i, o in enumerate(_SLOT_HOLDERS)}
        pickler.dump(obj)
        if self.repeats:
            self.memo_size = len(pickler.memo.copy())
        return out.getvalue()

    def _pickler(self) -> Any:
        import torch

        tensor, parameter, storage_types = torch.Tensor, torch.nn.Parameter, _storage_types()
        add_name, add_tensor, on_storage = self.names.append, self.tensors.append, self._on_storage
        on_tensor = None if self._hasty else self._on_tensor

        class Pickler(pickle.Pickler):
            def persistent_id(self, o: Any) -> Any:  # called for every object: the common kinds first
                t = type(o)
                if t is str:
                    return add_name(o)
                if t is tensor or t is parameter:
                    if on_tensor is not None:
                        return on_tensor(o)
                    add_tensor(o)
                    return _MARK
                if isinstance(o, storage_types):
                    return on_storage(o)
                return None

        return Pickler

    def _on_tensor(self, t: Any) -> Optional[int]:
        if self._odd and not _plain(t):
            return None
        n = len(self.tensors)
        first = self._seen.setdefault(id(t), n)
        if first == n:
            self.tensors.append(t)
        else:
            self.repeats[n + len(self.repeats)] = first
        return _MARK

    def _on_storage(self, s: Any) -> tuple:
        self.storages.append(s)
        return self.book.direct(s)


def _storage_types() -> tuple:
    import torch

    out = [torch.storage.TypedStorage, torch.UntypedStorage]
    legacy = getattr(torch.storage, "_LegacyStorage", None)
    return tuple(out + ([legacy] if legacy is not None else []))


def _splice(outer: bytes, fragments: List[bytes]) -> bytes:
    parts = outer.split(_MARK_BYTES)
    if len(parts) != len(fragments) + 1:
        raise ValueError("tensors in the pickle: %d, expected %d" % (len(parts) - 1, len(fragments)))
    both = [b""] * (2 * len(parts) - 1)
    both[0::2] = parts
    both[1::2] = fragments
    return b"".join(both)


def _with_repeats(scan: _Scan, fragments: List[bytes]) -> List[bytes]:
    """A tensor object that occurs again is the same object after loading: memoised at first, then fetched."""
    if not scan.repeats:
        return fragments
    slot = {i: scan.memo_size + k for k, i in enumerate(sorted(set(scan.repeats.values())))}
    first = iter(f + b"r" + struct.pack("<I", slot[i]) if i in slot else f for i, f in enumerate(fragments))
    total = len(fragments) + len(scan.repeats)
    return [b"j" + struct.pack("<I", slot[scan.repeats[n]]) if n in scan.repeats else next(first)
            for n in range(total)]


def _plain(t: Any) -> bool:
    """Whether a tensor is one that _fragment knows."""
    import torch

    return (t.layout is torch.strided and not t.is_quantized and t.device.type in ("cpu", "cuda") and not t.__dict__
            and not t.is_neg() and not t.is_conj() and not getattr(t, "is_nested", False)
            and t.dtype in _dtype_names())


def _dtype_names() -> Dict[Any, str]:
    """dtype -> name of the storage class that stands for it, "" for those that came after these classes."""
    import torch

    names = _DTYPES.get("names")
    if names is None:
        known = torch.storage._dtype_to_storage_type_map()
        new = getattr(torch.storage, "_new_dtypes", lambda: ())()
        names = {d: n for d, n in known.items() if d not in new and not n.startswith("Q")}
        if hasattr(torch._utils, "_rebuild_tensor_v3"):
            names.update({d: "" for d in new})
        _DTYPES["names"] = names
    return names


_DTYPES: Dict[str, Any] = {}
_own_attributes = attrgetter("__dict__")
_PART = 256  # tensors


def _questions() -> List[Any]:
    import torch

    return [torch.Tensor.data_ptr, torch.Tensor.is_contiguous, attrgetter("dtype"), attrgetter("requires_grad"),
            attrgetter("shape")]


class _Facts:
    """Everything about a list of tensors, except their contents, that goes into the file.

    Most tensors fill their storage: then address, shape, strides and type prove that the same bytes are meant. For the
    others the storage itself is compared as well.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._types = list(map(type, tensors))
        self._columns = [(ask, list(map(ask, tensors))) for ask in _questions()]
        self._strides = {i: t.stride() for i, t in enumerate(tensors) if not t.is_contiguous()}
        self._special = [i for i, t in enumerate(tensors) if not _fills(t)]
        self._storages = self._storage_facts(tensors)

    def same(self, tensors: Sequence[Any]) -> bool:
        try:
            return (list(map(type, tensors)) == self._types and not any(map(_own_attributes, tensors))
                    and self._same_columns(tensors) and self._storages == self._storage_facts(tensors))
        except (RuntimeError, NotImplementedError):
            return False  # a kind of tensor without address or strides

    def _same_columns(self, tensors: Sequence[Any]) -> bool:
        # In parts, because each tensor should be brought into the CPU's cache once. Shape and contiguity stand for the
        # strides, which take longer to ask for.
        for at in range(0, len(tensors), _PART):
            part = tensors[at:at + _PART]
            for ask, column in self._columns:
                if list(map(ask, part)) != column[at:at + _PART]:
                    return False
        return all(tensors[i].stride() == s for i, s in self._strides.items())

    def _storage_facts(self, tensors: Sequence[Any]) -> list:
        out = []
        for i in self._special:
            t = tensors[i]
            s = _untyped(t)
            out.append((s.data_ptr(), s.nbytes(), t.storage_offset(), str(t.device), t.layout, t.is_neg(), t.is_conj()))
        return out


def _fills(t: Any) -> bool:
    n = t.numel() * t.element_size()
    return bool(n) and t.is_contiguous() and not t.is_complex() and _untyped(t).nbytes() == n


def _untyped(t: Any) -> Any:
    """The untyped storage of a tensor or of a typed storage, in every version of torch."""
    import torch

    if isinstance(t, torch.UntypedStorage):
        return t
    if isinstance(t, torch.Tensor):
        return t.untyped_storage() if hasattr(t, "untyped_storage") else t.storage()._storage
    return t._untyped_storage if hasattr(t, "_untyped_storage") else t._storage


class _Book:
    """The storages in the file, their keys, and the pickled bytes of tensors seen so far."""

    def __init__(self) -> None:
        self.kept: List[Any] = []  # the storages; the key is the index
        self.tags: List[str] = []
        self.owners: List[int] = []  # index of a tensor with this storage, -1 = none
        self._keys: Dict[int, int] = {}
        self._dtypes: Dict[int, Any] = {}
        self._slots: Dict[bytes, bytes] = {}

    def key(self, storage: Any, dtype: Any, owner: int = -1) -> int:
        ptr = storage.data_ptr()
        if ptr and self._dtypes.setdefault(ptr, dtype) != dtype:
            raise RuntimeError("tensors or storages view the same data as different types")
        k = self._keys.setdefault(storage._cdata, len(self.kept))
        if k == len(self.kept):
            self.kept.append(storage)
            self.tags.append(_location(storage))
            self.owners.append(owner)
        return k

    def direct(self, o: Any) -> tuple:
        """The persistent id of a storage that is pickled by itself, as torch.save gives it."""
        import torch

        s = _untyped(o)
        if s is o:
            cls, dtype, numel = torch.UntypedStorage, torch.uint8, s.nbytes()
        else:
            name = getattr(o, "_pickle_storage_type", None) or o.pickle_storage_type
            cls, dtype, numel = getattr(torch, name()), o.dtype, s.nbytes() // torch._utils._element_size(o.dtype)
        k = self.key(s, dtype)
        return ("storage", cls, str(k), self.tags[k], numel)

    def memo(self, op: bytes) -> bytes:
        """op, at first with a PUT, later as a GET."""
        got = self._slots.get(op)
        if got is not None:
            return got
        n = len(self._slots)
        if n >= _RESERVED:
            return op
        self._slots[op] = b"h" + bytes([n])
        return op + b"q" + bytes([n])


def _location(storage: Any) -> str:
    import torch

    return "cpu" if storage.device.type == "cpu" else torch.serialization.location_tag(storage)


def _fragment(i: int, t: Any, book: _Book) -> bytes:
    """The pickle of one plain tensor or Parameter: the same calls that its __reduce_ex__ asks for."""
    import torch

    if type(t) is not torch.nn.Parameter:
        return _tensor_fragment(i, t, t.requires_grad, book)
    head = book.memo(b"ctorch._utils\n_rebuild_parameter\n")
    return b"".join((head, b"(", _tensor_fragment(i, t, False, book), _bool(t.requires_grad), _hooks(book), b"tR"))


def _tensor_fragment(i: int, t: Any, requires_grad: bool, book: _Book) -> bytes:
    import torch

    storage, name = _untyped(t), _dtype_names()[t.dtype]
    key = book.key(storage, t.dtype if name else torch.uint8, i)
    v3 = not name
    numel = storage.nbytes() if v3 else storage.nbytes() // t.element_size()
    cls = b"ctorch.storage\nUntypedStorage\n" if v3 else b"ctorch\n" + name.encode() + b"\n"
    return b"".join((
        book.memo(b"ctorch._utils\n_rebuild_tensor_v3\n" if v3 else b"ctorch._utils\n_rebuild_tensor_v2\n"), b"((",
        book.memo(_text("storage")), book.memo(cls), _text(str(key)), book.memo(_text(book.tags[key])), _int(numel),
        b"tQ", _int(t.storage_offset()), _ints(t.shape), _ints(t.stride()), _bool(requires_grad), _hooks(book),
        book.memo(b"ctorch\n" + str(t.dtype).split(".")[1].encode() + b"\n") if v3 else b"", b"tR"))


def _hooks(book: _Book) -> bytes:
    return book.memo(b"ccollections\nOrderedDict\n") + b")R"


def _bool(v: bool) -> bytes:
    return b"\x88" if v else b"\x89"


def _text(s: str) -> bytes:
    b = s.encode()
    return b"X" + struct.pack("<I", len(b)) + b


def _int(n: int) -> bytes:
    if 0 <= n < 256:
        return b"K" + bytes([n])
    if 0 <= n < 65536:
        return b"M" + struct.pack("<H", n)
    if -(1 << 31) <= n < 1 << 31:
        return b"J" + struct.pack("<i", n)
    b = pickle.encode_long(n)
    return b"\x8a" + bytes([len(b)]) + b


def _ints(values: Sequence[int]) -> bytes:
    items = b"".join(map(_int, values))
    n = len(values)
    return b")" if n == 0 else items + b"\x85\x86\x87"[n - 1:n] if n < 4 else b"(" + items + b"t"


# ---------------------------------------------------------------------------------------------------------------------
# The zip container
# ---------------------------------------------------------------------------------------------------------------------


class _Zip:
    """The offsets of all parts: the storages' records, then data.pkl with room to grow, then the directory.

    data.pkl is last and the directory starts at a fixed place, so that a pickle of another length moves nothing.
    force64 writes every size and offset in its 64-bit form.
    """

    def __init__(self, book: _Book, pickled: int, force64: bool = False) -> None:
        self._limit = 0 if force64 else _MAX32
        self.fresh: List[Tuple[int, bytes]] = []
        self.sources: List[Tuple[int, int, int, None]] = []
        self.which: List[int] = []  # the index of the storage of each source
        self.owners = book.owners
        self._last_tail: Tuple[Optional[bytes], list] = (None, [])
        self.packed: Dict[int, bytes] = {}  # offset in a segment -> the fix-ups as they stand there
        self.foreign = any(s.device.type != "cpu" for s in book.kept)
        entries: List[Tuple[bytes, int, int, int, int]] = []  # (name, size, header, payload, crc)
        at = 0
        for name, data in ((b"archive/byteorder", sys.byteorder.encode()), (b"archive/version", b"3\n")):
            head, pay = self._head(name, at, len(data), zlib.crc32(data), _ALIGN)
            self.fresh.append((at, head + data))
            entries.append((name, len(data), at, pay, zlib.crc32(data)))
            at = pay + len(data)
        for i, s in enumerate(book.kept):
            name, n = b"archive/data/%d" % i, s.nbytes()
            head, pay = self._head(name, at, n, 0, PAGE if n >= _BIG else _ALIGN)
            self.fresh.append((at, head))
            entries.append((name, n, at, pay, 0))
            if n:
                self.sources.append((pay, n, s.data_ptr(), None))
                self.which.append(i)
            at = pay + n
        self._pkl_at = at
        self._pkl_pay = self._head(_PKL, at, pickled, 0, _ALIGN)[1]
        self._dir_at = -(-(self._pkl_pay + pickled + pickled // 8 + 512) // PAGE) * PAGE
        self.room = self._dir_at - self._pkl_pay
        self._directory(entries)

    def _head(self, name: bytes, at: int, size: int, crc: int, align: int) -> Tuple[bytes, int]:
        """(local header, offset of the payload). An extra field "FB" pads the payload into place, as torch does."""
        wide = struct.pack("<HHQQ", 1, 16, size, size) if size >= self._limit else b""
        start = at + 30 + len(name) + len(wide) + 4
        pad = -start % align
        extra = wide + struct.pack("<2sH", b"FB", pad) + b"Z" * pad
        shown = _MAX32 if wide else size
        head = struct.pack("<IHHHHHIIIHH", 0x04034B50, 45 if wide else 20, 0, 0, 0, 33, crc, shown, shown, len(name),
                           len(extra))
        return head + name + extra, start + pad

    def _entry(self, name: bytes, size: int, header: int, crc: int) -> bytes:
        wide = b""
        if size >= self._limit:
            wide += struct.pack("<QQ", size, size)
        if header >= self._limit:
            wide += struct.pack("<Q", header)
        shown = _MAX32 if size >= self._limit else size
        where = _MAX32 if header >= self._limit else header
        extra = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
        version = 45 if wide else 20
        return struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, version, version, 0, 0, 0, 33, crc, shown, shown,
                           len(name), len(extra), 0, 0, 0, 0, where) + name + extra

    def _directory(self, entries: Sequence[Tuple[bytes, int, int, int, int]]) -> None:
        parts, at = [], self._dir_at
        self.fixups: List[Fixup] = []
        for name, size, header, pay, crc in entries:
            e = self._entry(name, size, header, crc)
            if size and not crc:
                self.fixups.append((pay, size, header + 14, at + 16))
            parts.append(e)
            at += len(e)
        self.fresh.append((self._dir_at, b"".join(parts)))
        self._pkl_entry_at = at
        self._count = len(entries) + 1
        self.length = at + len(self._end_of_directory(0))

    def _end_of_directory(self, pickled: int) -> bytes:
        """data.pkl's directory entry and the end records. Its length does not depend on the size of the pickle."""
        e = self._entry(_PKL, pickled, self._pkl_at, 0)
        size, n = self._pkl_entry_at + len(e) - self._dir_at, self._count
        wide = self._limit == 0 or n >= 0xFFFF or size >= _MAX32 or self._dir_at >= _MAX32
        out = e
        if wide:
            out += struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, n, n, size, self._dir_at)
            out += struct.pack("<IIQI", 0x07064B50, 0, self._pkl_entry_at + len(e), 1)
        return out + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF if wide else n, 0xFFFF if wide else n,
                                 _MAX32 if wide else size, _MAX32 if wide else self._dir_at, 0)

    def tail(self, pickled: bytes) -> List[Tuple[int, bytes]]:
        """The bytes that change with the pickle."""
        if pickled is self._last_tail[0]:
            return self._last_tail[1]
        head, pay = self._head(_PKL, self._pkl_at, len(pickled), 0, _ALIGN)
        tail = [(self._pkl_at, b"".join((head, pickled, bytes(self._dir_at - pay - len(pickled))))),
                (self._pkl_entry_at, self._end_of_directory(len(pickled)))]
        self._last_tail = (pickled, tail)
        return tail

    def last_fixup(self, pickled: int) -> Fixup:
        return self._pkl_pay, pickled, self._pkl_at + 14, self._pkl_entry_at + 16


def torch_load(view: Any) -> Any:
    """The object in a torch zip file that lies in memory. Zero copy: its tensors are views of the bytes.

    view: a writable buffer (memoryview, mmap). The tensors keep it alive. Every tensor is on the CPU. The bytes must
    come from a trusted writer: this unpickles them.
    """
    view = memoryview(view).cast("B")
    try:
        records = _records(view)
        pickled = records[b"data.pkl"]
    except (KeyError, ValueError, struct.error):
        import torch

        return torch.load(io.BytesIO(view), map_location="cpu")
    return _Unpickler(view, records, view[pickled[0]:pickled[0] + pickled[1]]).load()


def _records(view: memoryview) -> Dict[bytes, Tuple[int, int]]:
    """{name without the top directory: (offset, length)} of a zip whose entries are stored."""
    end = bytes(view[-22:])
    if end[:4] != b"PK\x05\x06":
        raise ValueError("no zip directory at the end")
    count, size, at = struct.unpack_from("<HII", end, 10)
    if bytes(view[-42:-38]) == b"PK\x06\x07":
        where = struct.unpack_from("<Q", view, len(view) - 42 + 8)[0]
        count, size, at = struct.unpack_from("<QQQ", view, where + 32)
    out = {}
    for _ in range(count):
        method, n, name_len, extra_len, comment_len, header = _ENTRY.unpack_from(view, at)
        name = bytes(view[at + 46:at + 46 + name_len])
        if n == _MAX32 or header == _MAX32:
            n, header = _wide(view[at + 46 + name_len:at + 46 + name_len + extra_len], n, header)
        if method != 0:
            raise ValueError("a compressed entry")
        a, b = struct.unpack_from("<HH", view, header + 26)
        out[name.partition(b"/")[2]] = (header + 30 + a + b, n)
        at += 46 + name_len + extra_len + comment_len
    return out


_ENTRY = struct.Struct("<10xH12xIHHH8xI")


def _wide(extra: memoryview, size: int, header: int) -> Tuple[int, int]:
    at = 0
    while struct.unpack_from("<H", extra, at)[0] != 1:
        at += 4 + struct.unpack_from("<H", extra, at + 2)[0]
    at += 4
    if size == _MAX32:
        size, at = struct.unpack_from("<Q", extra, at)[0], at + 16  # the compressed size is between
    if header == _MAX32:
        header = struct.unpack_from("<Q", extra, at)[0]
    return size, header


class _Unpickler(pickle.Unpickler):
    """As torch.load's, with storages that are views."""

    def __init__(self, view: memoryview, records: Dict[bytes, Tuple[int, int]], pickled: memoryview) -> None:
        super().__init__(io.BytesIO(pickled))
        self._view = view
        self._records = records
        self._storages: Dict[Any, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module in ("torch", "torch.cuda", "torch.storage") and name.endswith("Storage"):
            made = torch.serialization.StorageType
            if name not in ("UntypedStorage", "TypedStorage"):
                return made(name)
        return super().find_class("torch._tensor" if module == "torch.tensor" else module, name)

    def persistent_load(self, pid: Any) -> Any:
        import torch

        _, kind, key, _, _ = pid
        got = self._storages.get(key)
        if got is None:
            off, n = self._records[b"data/" + key.encode()]
            dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
            got = self._storages[key] = _typed(_view_storage(self._view, off, n), dtype)
        return got


def _view_storage(view: memoryview, off: int, n: int) -> Any:
    import torch

    if not n:
        return torch.UntypedStorage(0)
    return _untyped(torch.frombuffer(view, dtype=torch.uint8, count=n, offset=off))


def _typed(storage: Any, dtype: Any) -> Any:
    import torch

    try:
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
    except TypeError:  # torch 1.13
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype)
