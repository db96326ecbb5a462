"""Copying images into mapped memory."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from array import array
from typing import Any, Dict, List, Sequence, Tuple

from .image import Fixup, Plan
from .segment import HEADER, PAGE, Buffer

log = logging.getLogger("dlrover.ckpt")

_SMALL = 256 << 10  # up to this size a copy is not worth a switch of the GIL
_CHUNK = 32 << 20  # larger ones are cut, to be shared among threads


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
    """The copies that fill one buffer from one layout; made once and used again while the layout is the same."""

    def __init__(self, plans: Sequence[Plan], bases: Sequence[int], b: Buffer) -> None:
        m = b.map()
        view = m.view
        self.keys = [p.key for p in plans]
        self.bases = list(bases)
        memory = memoryview(_Everything.from_address(0)).cast("B")
        self.small: List[Tuple[memoryview, memoryview]] = []
        self.large: List[Tuple[int, int, int]] = []
        for plan, base in zip(plans, bases):
            start = HEADER + base
            for off, n, addr, storage in plan.sources:
                if storage is not None:
                    continue
                at = start + off
                if n <= _SMALL:
                    self.small.append((view[at:at + n], memory[addr:addr + n]))
                else:
                    self.large.append((m.addr + at, addr, n))

    def serves(self, plans: Sequence[Plan], bases: Sequence[int]) -> bool:
        return (self.bases == list(bases) and len(self.keys) == len(plans)
                and all(k is not None and k is p.key for k, p in zip(self.keys, plans)))


def fill(b: Buffer, plans: Sequence[Plan], bases: Sequence[int], threads: int) -> None:
    """Copies images into a buffer. What it holds already of the same layout is not written again."""
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
        _copy_large(copies.large, threads)
        for dst, src in copies.small:
            dst[:] = src
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


def _copy_large(copies: Sequence[Tuple[int, int, int]], threads: int) -> None:
    """memmove without the GIL, by several threads that take a piece each."""
    if not copies:
        return
    work = [(dst + o, src + o, min(_CHUNK, n - o)) for dst, src, n in copies for o in range(0, n, _CHUNK)]
    left = iter(work)  # taking from a list's iterator is atomic
    def run() -> None:
        for dst, src, n in left:
            ctypes.memmove(dst, src, n)
    helpers = [threading.Thread(target=run, daemon=True) for _ in range(min(threads, len(work)) - 1)]
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

    The buffer is registered with CUDA once, so that the copies are direct and run beside each other; where that fails
    they are pageable ones, which are right but slower.
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
            side.wait_stream(torch.cuda.current_stream())  # what computes the tensors comes first
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
