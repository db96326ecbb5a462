"""Copying images into mapped memory."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from array import array
from typing import Any, Callable, Dict, Iterable, Iterator, List, Sequence, Tuple

from . import stream
from .image import Fixup, Plan
from .segment import HEADER, PAGE, Buffer, Mapping

log = logging.getLogger("dlrover.ckpt")

_SMALL = 256 << 10  # up to this size a copy is not worth a switch of the GIL
_CHUNK = 8 << 20  # bytes that a thread copies at a time, about

Row = Tuple[int, int, int]  # destination, source, bytes


# All addresses, so that a view of some costs one slice instead of a new ctypes object.
_Everything = ctypes.c_ubyte * (1 << 60)


def offsets(lengths: Sequence[int]) -> Tuple[List[int], int]:
    """Where files of these lengths lie in an image (page aligned), and the length of the whole."""
    out, at = [], 0
    for n in lengths:
        out.append(at)
        at += -(-n // PAGE) * PAGE
    return out, (out[-1] + lengths[-1] if out else 0)


def pack_fixups(plans: Sequence[Plan], bases: Sequence[int]) -> bytes:
    """The table of a segment: rows of four 64-bit numbers, offsets in the image."""
    parts = []
    for plan, base in zip(plans, bases):
        if plan.key is None:
            parts.append(_rows(plan.fixed, base))
        else:
            if base not in plan.key.packed:
                plan.key.packed = {base: _rows(plan.fixed, base)}
            parts.append(plan.key.packed[base])
        parts.append(_rows(plan.fixups, base))
    return b"".join(parts)


def _rows(fixups: Sequence[Fixup], base: int) -> bytes:
    flat = array("Q")
    for off, n, dst1, dst2 in fixups:
        flat.extend((off + base, n, dst1 and dst1 + base, dst2 and dst2 + base))
    return flat.tobytes()


class Copies:
    """The copies that fill one buffer from one layout; made once and used again while the layout is the same.

    moves: functions that several threads may call at the same time, each of them once; together they copy everything
    """

    def __init__(self, plans: Sequence[Plan], bases: Sequence[int], b: Buffer) -> None:
        self.keys = [p.key for p in plans]
        self.bases = list(bases)
        m = b.map()
        rows = ((m.addr + HEADER + base + off, addr, n) for plan, base in zip(plans, bases)
                for off, n, addr, storage in plan.sources if storage is None)
        self.moves = _moves(_cut(rows), m)

    def serves(self, plans: Sequence[Plan], bases: Sequence[int]) -> bool:
        return (self.bases == list(bases) and len(self.keys) == len(plans)
                and all(k is not None and k is p.key for k, p in zip(self.keys, plans)))


def _cut(rows: Iterable[Row]) -> Iterator[Row]:
    for dst, src, n in rows:
        for at in range(0, n, _CHUNK):
            yield dst + at, src + at, min(_CHUNK, n - at)


def _moves(rows: Iterable[Row], m: Mapping) -> List[Callable[[], Any]]:
    copy = stream.copier()
    if copy is None:
        return _plain_moves(rows, m)
    table, others = array("Q"), []
    for row in rows:
        if row[0] % stream.ALIGN:
            others.append(row)
        else:
            table.extend(row)
    return _streamed(copy, table) + _plain_moves(others, m)


def _streamed(copy: Callable[[int, int], Any], table: "array[int]") -> List[Callable[[], Any]]:
    """Calls that copy a few MiB each: threads that share them end at about the same time."""
    moves: List[Callable[[], Any]] = []
    start = nbytes = 0
    for end in range(3, len(table) + 1, 3):
        nbytes += table[end - 1]
        if nbytes >= _CHUNK or end == len(table):
            part = table[start:end]
            moves.append(functools.partial(_copy_rows, copy, part))
            start, nbytes = end, 0
    return moves


def _copy_rows(copy: Callable[[int, int], Any], rows: "array[int]") -> None:
    copy(rows.buffer_info()[0], len(rows) // 3)


def _plain_moves(rows: Iterable[Row], m: Mapping) -> List[Callable[[], Any]]:
    """memmove without the GIL for large rows. For small ones a switch of the GIL costs more than their copy."""
    view, memory = m.view, memoryview(_Everything.from_address(0)).cast("B")
    moves: List[Callable[[], Any]] = []
    small: List[Tuple[memoryview, memoryview]] = []
    for dst, src, n in rows:
        if n > _SMALL:
            moves.append(functools.partial(ctypes.memmove, dst, src, n))
        else:
            small.append((view[dst - m.addr:dst - m.addr + n], memory[src:src + n]))
    return moves + ([functools.partial(_assign, small)] if small else [])


def _assign(pairs: Sequence[Tuple[memoryview, memoryview]]) -> None:
    for dst, src in pairs:
        dst[:] = src


def fill(b: Buffer, plans: Sequence[Plan], bases: Sequence[int], threads: int) -> None:
    """Copies images into a buffer. Content of the same layout that it already holds is not written again."""
    view = b.map().view
    copies = b.filled_by
    if not isinstance(copies, Copies) or not copies.serves(plans, bases):
        b.filled_by = None
        copies = Copies(plans, bases, b)
        for plan, base in zip(plans, bases):
            _write(view, plan.fresh, HEADER + base)
        end = 0
        for plan, base in zip(plans, bases):  # the space between the files
            view[HEADER + end:HEADER + base] = bytes(base - end)
            end = base + _end(plan)
    on_device = [(HEADER + base + s[0], s[1], s[3]) for p, base in zip(plans, bases) for s in p.on_device()]
    finish = start_device_copies(b, on_device) if on_device else None
    try:
        _run(copies.moves, threads)
        for plan, base in zip(plans, bases):
            _write(view, plan.pieces, HEADER + base)
    finally:
        if finish is not None:
            finish()
    b.filled_by = copies


def _end(plan: Plan) -> int:
    literal = (o + len(d) for part in (plan.fresh, plan.pieces) for o, d in part)
    return max(max(literal, default=0), max((s[0] + s[1] for s in plan.sources), default=0))


def _write(view: memoryview, pieces: Sequence[Tuple[int, bytes]], start: int) -> None:
    for off, data in pieces:
        at = start + off
        view[at:at + len(data)] = data


def default_threads() -> int:
    return 2 if len(os.sched_getaffinity(0)) >= 2 else 1


def _run(moves: Sequence[Callable[[], Any]], threads: int) -> None:
    """Several threads take a move each, until none is left."""
    left = iter(moves)  # taking from a list's iterator is atomic

    def run() -> None:
        for move in left:
            move()

    helpers = [threading.Thread(target=run, daemon=True) for _ in range(min(threads, len(moves)) - 1)]
    for t in helpers:
        t.start()
    try:
        run()
    finally:
        for t in helpers:
            t.join()


# ---------------------------------------------------------------------------------------------------------------------
# Devices
# ---------------------------------------------------------------------------------------------------------------------


def start_device_copies(b: Buffer, copies: Sequence[Tuple[int, int, Any]]) -> Any:
    """Starts copies from devices into the buffer. Returns the function that waits for them.

    The buffer is registered with CUDA once, so that the copies are direct and run in parallel. Where that fails they
    are pageable ones, which are correct but slower.
    """
    import torch

    view = b.map().view
    pinned = register(b)
    by_device: Dict[Any, List[Tuple[int, int, Any]]] = {}
    for c in copies:
        by_device.setdefault(c[2].device, []).append(c)
    events = []
    for device, part in by_device.items():
        if device.type != "cuda":
            _copy_device(view, part, False)
            continue
        with torch.cuda.device(device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())  # the computation of the tensors is first
            with torch.cuda.stream(side):
                _copy_device(view, part, pinned)
                event = torch.cuda.Event()
                event.record(side)
            events.append(event)

    def finish() -> None:
        for event in events:
            event.synchronize()

    return finish


def _copy_device(view: memoryview, copies: Sequence[Tuple[int, int, Any]], pinned: bool) -> None:
    import torch

    for at, n, storage in copies:
        src = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:n]
        torch.frombuffer(view, dtype=torch.uint8, count=n, offset=at).copy_(src, non_blocking=pinned)


def register(b: Buffer) -> bool:
    """Registers the buffer's memory with CUDA, once for each mapping."""
    import torch

    m = b.map()
    known = getattr(m, "registered", None)
    if known is None:
        known = False
        try:
            known = int(torch.cuda.cudart().cudaHostRegister(m.addr, m.length, 0)) == 0
        except Exception as e:
            log.debug("cudaHostRegister: %s", e)
        m.registered = known
        if known:
            m.at_end(torch.cuda.cudart().cudaHostUnregister)
        else:
            log.warning("shared memory cannot be registered with CUDA: saves copy through pageable memory")
    return known
