"""Safetensors files as images: the bytes that safetensors.torch.save_file would write, without that package."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from .image import Image
from .slices import storage_at, untyped

# The names of the dtypes, in the order in which safetensors lays them out (last first). A dtype that this torch does
# not have is skipped.
_DTYPES = (
    ("bool", "BOOL"), ("float4_e2m1fn_x2", "F4"), ("uint8", "U8"), ("int8", "I8"), ("float8_e5m2", "F8_E5M2"),
    ("float8_e4m3fn", "F8_E4M3"), ("float8_e8m0fnu", "F8_E8M0"), ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
    ("float8_e5m2fnuz", "F8_E5M2FNUZ"), ("int16", "I16"), ("uint16", "U16"), ("float16", "F16"), ("bfloat16", "BF16"),
    ("int32", "I32"), ("uint32", "U32"), ("float32", "F32"), ("complex64", "C64"), ("float64", "F64"),
    ("int64", "I64"), ("uint64", "U64"))
_MAX_HEADER = 100 << 20  # bytes; safetensors refuses to read more


def safetensors_image(path: str, tensors: Mapping[str, Any], metadata: Optional[Mapping[str, str]] = None,
                      dedupe: bool = False) -> Image:
    """The file that safetensors.torch.save_file(tensors, path, metadata) means.

    dedupe: of tensors that are the same memory only one is stored and the metadata names the others, as
    safetensors.torch.save_model does. Without it, shared memory raises RuntimeError. Values that are not dense,
    contiguous tensors raise ValueError, as does an unknown dtype.
    """
    kept, notes = dict(tensors), dict(metadata or {})
    for name, tensor in kept.items():
        _check(name, tensor)
    for names in shared(kept):
        if not dedupe:
            raise RuntimeError(
                "the tensors %s share memory and a safetensors file cannot say so: save one of them, or use dedupe"
                % ", ".join(names))
        keep = _whole(names, kept)
        for name in names:
            if name != keep:
                notes.setdefault(name, keep)
                del kept[name]
    ranks = _ranks()
    order = sorted(kept, key=lambda name: (-ranks[kept[name].dtype][0], name.encode()))
    return from_header(path, _header(order, kept, ranks, notes), [kept[name] for name in order])


def from_header(path: str, header: bytes, tensors: Iterable[Any]) -> Image:
    """An image with this header (length field included) and the contiguous tensors after it, without gaps."""
    spans: List[Tuple[int, int, Any]] = []
    at = len(header)
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes:
            spans.append((at, nbytes, storage_at(tensor.detach())))
        at += nbytes
    layout = hashlib.sha256(header).hexdigest()[:32]
    return Image(path, "safetensors", at, [(0, header)], spans, layout=layout)


def parse_header(head: bytes) -> Tuple[bytes, Dict[str, Any]]:
    """(header with its length field, {name: {"dtype", "shape", "data_offsets"}} in the order of the data) of the first
    bytes of a safetensors file. Raises ValueError when they are not, or too few."""
    if len(head) < 8:
        raise ValueError("a safetensors file has at least 8 bytes, not %d" % len(head))
    end = 8 + struct.unpack_from("<Q", head)[0]
    if end - 8 > _MAX_HEADER or len(head) < end:
        raise ValueError("the safetensors header of %d bytes is too long or cut off" % (end - 8))
    entries = json.loads(head[8:end].decode())
    entries.pop("__metadata__", None)
    return head[:end], dict(sorted(entries.items(), key=lambda entry: entry[1]["data_offsets"]))


def dtype_name(dtype: Any) -> str:
    """The name that safetensors has for a torch dtype. Raises ValueError if there is none."""
    ranks = _ranks()
    if dtype not in ranks:
        raise ValueError("safetensors has no name for %s" % dtype)
    return ranks[dtype][1]


def shared(tensors: Mapping[str, Any]) -> List[List[str]]:
    """The groups of names whose tensors overlap in memory."""
    spans: Dict[Any, List[Tuple[int, int, str]]] = {}
    for name, t in tensors.items():
        nbytes = t.numel() * t.element_size()
        if nbytes and t.device.type != "meta":
            spans.setdefault((t.device, untyped(t).data_ptr()), []).append((t.data_ptr(), t.data_ptr() + nbytes, name))
    groups: List[List[str]] = []
    for span in spans.values():
        group: List[str] = []
        end = 0
        for start, stop, name in sorted(span):
            if start >= end:
                groups.append(group)
                group = []
            group.append(name)
            end = max(end, stop)
        groups.append(group)
    return [sorted(group) for group in groups if len(group) > 1]


def _whole(names: List[str], tensors: Mapping[str, Any]) -> str:
    """The first name of a tensor that fills the shared storage."""
    for name in names:
        t = tensors[name]
        if t.numel() * t.element_size() == untyped(t).nbytes():
            return name
    raise RuntimeError("the tensors %s share memory and none of them is the whole of it: clone them before saving"
                       % ", ".join(names))


def _check(name: str, tensor: Any) -> None:
    import torch

    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise ValueError("%r: a safetensors file holds only tensors under strings, not %s" % (name, type(tensor)))
    if tensor.layout != torch.strided:
        raise ValueError("%s is sparse: a safetensors file holds only dense tensors; use to_dense()" % name)
    if not tensor.is_contiguous():
        raise ValueError("%s is not contiguous: a safetensors file has no strides; use contiguous()" % name)
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("%s is a lazy conjugate or negative: resolve it first" % name)
    dtype_name(tensor.dtype)


def _header(order: List[str], tensors: Mapping[str, Any], ranks: Mapping[Any, Tuple[int, str]],
            metadata: Mapping[str, str]) -> bytes:
    head: Dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        t = tensors[name]
        end = at + t.numel() * t.element_size()
        kind = ranks[t.dtype][1]
        shape = list(t.shape[:-1]) + [t.shape[-1] * 2] if kind == "F4" else list(t.shape)  # two numbers in a byte
        head[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()
    if len(text) > _MAX_HEADER:
        raise ValueError("the safetensors header would have %d bytes, at most %d are allowed: save several files"
                         % (len(text), _MAX_HEADER))
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _ranks() -> Dict[Any, Tuple[int, str]]:
    import torch

    return {getattr(torch, name): (rank, short) for rank, (name, short) in enumerate(_DTYPES) if hasattr(torch, name)}
