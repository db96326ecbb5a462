"""Checkpoints in the format of torch.distributed.checkpoint, as images and from memory.

Saver makes of a state dict the files that torch.distributed.checkpoint.save would write: one __<rank>_0.distcp per
rank and .metadata on rank 0. Stock torch.distributed.checkpoint.load reads them. reader() returns the storage reader
for the result of Engine.load.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from .image import Image, Plan, raw, torch_load, torch_zip
from .slices import storage_at

_METADATA = ".metadata"
_ALIGN = 64  # bytes; keeps the payload alignment that torch_zip gives
_SMALLEST = 64  # bytes; the file of a rank that has nothing to write
_MAX_COMMENT = 65535  # bytes that a zip comment can take
_SCALARS = (bool, int, float, str, bytes, type(None))


def require_torch() -> None:
    """Raises RuntimeError when this torch has no usable torch.distributed.checkpoint."""
    import torch

    release = torch.__version__.split("+")[0].split(".")
    if tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in release[:2]) < (2, 1):
        raise RuntimeError(
            "FSDP checkpoints need torch 2.1 or newer, this is torch %s: upgrade torch, or save full state dicts with "
            "DdpCheckpointer" % torch.__version__)


def host_group(timeout: float = 600) -> Any:
    """A gloo group of all ranks, for objects and bytes in host memory; None without torch.distributed. Collective."""
    import datetime

    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))


class Saver:
    """Turns state dicts into images.

    The first save, and each save after the structure (names, shapes, dtypes, sharding) has changed, plans with all
    ranks as torch.distributed.checkpoint does. Every other save neither communicates nor plans. A change of structure
    has to come in the same save on all ranks; ranks that disagree fail after the timeout of the group. When a rank
    other than 0 has keys of its own, every save is planned.
    """

    def __init__(self, group: Any = None) -> None:
        """group: a gloo group of all ranks (host_group()); None for a single process."""
        require_torch()
        self._group = group
        self._rank, self._world = _rank_and_size(group)
        self._known: Any = None  # the structure that the plan is for
        self._shared = True  # every item of another rank than 0 is a shard or exists on all ranks
        self._file = _RankFile("__%d_0.distcp" % self._rank)
        self._metadata: Any = None  # rank 0
        self._entries: Dict[Any, Any] = {}  # rank 0: the storage data of all ranks
        self._pickled = b""

    def images(self, state_dict: Mapping[str, Any], directory: str) -> List[Image]:
        """The files of this rank in directory. The tensors must not change before the images have been copied."""
        import torch

        with torch.no_grad():
            planner = _planner(state_dict, self._rank == 0)
            known = (_structure(planner.state_dict), planner.mappings)
            if self._changed(known):
                self._plan(planner)
                self._known = known
            moved = self._file.fill(planner)
        images = [self._file.image(directory)]
        if self._rank == 0:
            if moved or not self._pickled:
                self._entries.update(self._file.entries())
                self._pickled = self._pickle()
            images.append(raw(os.path.join(directory, _METADATA), self._pickled))
        elif moved:
            raise RuntimeError("the state dict of rank %d has changed while the images were made" % self._rank)
        return images

    def _changed(self, known: Any) -> bool:
        # Without sharing, an object of another rank may outgrow its place, which rank 0 could not see.
        return not self._shared or known != self._known

    def _plan(self, planner: Any) -> None:
        self._known = None
        local = _attempt(planner.create_local_plan)
        plan, self._shared = self._agree(local, lambda plans: self._global_plan(planner, plans))
        self._agree(_attempt(lambda: self._laid_out(planner, plan)), self._collect)
        self._pickled = b""

    def _laid_out(self, planner: Any, plan: Any) -> Dict[Any, Any]:
        self._file.lay_out(planner, planner.finish_plan(plan).items)
        return self._file.entries()

    def _global_plan(self, planner: Any, plans: List[Any]) -> List[Any]:
        shared = _all_shared(plans)
        plans, self._metadata = planner.create_global_plan(_objects_to_lowest(plans))
        return [(plan, shared) for plan in plans]

    def _collect(self, entries: List[Dict[Any, Any]]) -> List[None]:
        self._entries = {index: info for part in entries for index, info in part.items()}
        return [None] * len(entries)

    def _agree(self, value: Any, merge: Callable[[List[Any]], List[Any]]) -> Any:
        """Rank 0 merges the values of all ranks into one answer for each; an exception of anyone reaches everyone."""
        if self._world == 1:
            return merge([_checked(value)])[0]
        import torch.distributed as dist

        values: Optional[List[Any]] = [None] * self._world if self._rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        answers: Any = None
        if values is not None:
            answers = _attempt(lambda: merge([_checked(v) for v in values]))
            if isinstance(answers, Exception):
                answers = [answers] * self._world
        answer: List[Any] = [None]
        dist.scatter_object_list(answer, answers, src=0, group=self._group)
        return _checked(answer[0])

    def _pickle(self) -> bytes:
        metadata = copy.copy(self._metadata)
        metadata.storage_data = self._entries
        if hasattr(metadata, "storage_meta"):
            from torch.distributed.checkpoint.metadata import StorageMeta

            metadata.storage_meta = StorageMeta()
        if hasattr(metadata, "version"):
            from torch.distributed.checkpoint import filesystem

            metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        return pickle.dumps(metadata)


class _RankFile:
    """The .distcp file of one rank: objects first, then tensors, each a complete torch.save record."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._templates: Dict[Any, Optional[_Template]] = {}
        self._items: List[Tuple[Any, Any, _Template]] = []  # (write item, result of _shape_of, template)
        self._objects: List[Any] = []
        self._rooms: List[int] = []
        self._memo: Dict[bytes, bytes] = {}
        self._bodies: List[bytes] = []
        self._start = 0  # where the tensors begin
        self._sources: List[Any] = []
        self._pieces: List[Tuple[int, bytes]] = []
        self._fixups: List[Tuple[int, int, int, int]] = []
        self._offsets: List[int] = []
        self._length = 0
        self._layout = ""
        self._key: Optional[_Key] = None
        self._addresses: List[int] = []  # of the sources in host memory that the key is for

    def lay_out(self, planner: Any, items: Sequence[Any]) -> None:
        """Assigns the items to offsets."""
        self._items, self._objects, self._rooms, self._memo = [], [], [], {}
        for item in items:
            tensor = _tensor(planner, item)
            template = None if tensor is None else self._template(_shape_of(tensor))
            if template is None:
                self._objects.append(item)
            else:
                self._items.append((item, _shape_of(tensor), template))
        self._bodies = self._read_objects(planner)
        self._rooms = [_room(len(body)) for body in self._bodies]
        self._layout = ";".join("%s:%s%s" % (item.index.fqn, key[0], list(key[1])) for item, key, _ in self._items)
        self._place()

    def _template(self, key: Any) -> Optional["_Template"]:
        if key not in self._templates:
            self._templates[key] = _Template.of(*key)
        return self._templates[key]

    def _place(self) -> None:
        self._start = offset = sum(self._rooms)
        self._offsets, self._fixups = [], []
        parts: List[Tuple[int, bytes]] = []
        spans: List[Tuple[int, int]] = []
        for _, _, template in self._items:
            self._offsets.append(offset)
            parts += [(offset + at, data) for at, data in template.pieces]
            self._fixups += [_moved(row, offset) for row in template.fixups]
            spans.append((offset + template.payload, template.nbytes))
            offset = _align(offset + template.length)
        self._length = max(offset, _SMALLEST)
        self._pieces = _filled(_merged(parts), spans, self._start, self._length)
        self._key = None

    def fill(self, planner: Any) -> bool:
        """Takes the values of this save. True: the places have changed since entries() was last asked."""
        self._sources = []
        for (item, key, template), offset in zip(self._items, self._offsets):
            tensor = _tensor(planner, item)
            if tensor is None or _shape_of(tensor) != key:
                raise RuntimeError("%s has changed while the images were made" % item.index.fqn)
            if template.nbytes:
                self._sources.append((offset + template.payload, template.nbytes, storage_at(tensor)))
        bodies = self._read_objects(planner)
        rooms = [room if _fits(body, room) else _room(len(body)) for body, room in zip(bodies, self._rooms)]
        self._bodies = bodies
        if rooms == self._rooms:
            return False
        self._rooms = rooms
        sources = [(at - self._start, nbytes, storage) for at, nbytes, storage in self._sources]
        self._place()
        self._sources = [(at + self._start, nbytes, storage) for at, nbytes, storage in sources]
        return True

    def _read_objects(self, planner: Any) -> List[bytes]:
        """The record of each object; equal plain values are serialised once, and not again in the next save."""
        bodies: List[bytes] = []
        memo: Dict[bytes, bytes] = {}
        for item in self._objects:
            value = planner.lookup_object(item.index) if _is_bytes(item) else None
            key = pickle.dumps(value, 2) if _is_bytes(item) and _is_plain(value) else b""
            body = memo.get(key) or self._memo.get(key) or _record(planner, item)
            if key:
                memo[key] = body
            bodies.append(body)
        self._memo = memo
        return bodies

    def entries(self) -> Dict[Any, Any]:
        """Where each item is: {MetadataIndex: _StorageInfo}."""
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        found, offset = {}, 0
        for item, room in zip(self._objects, self._rooms):
            found[item.index] = _StorageInfo(self._name, offset, room)
            offset += room
        for (item, _, template), at in zip(self._items, self._offsets):
            found[item.index] = _StorageInfo(self._name, at, template.length)
        return found

    def image(self, directory: str) -> Image:
        objects = b"".join(_padded(body, room) for body, room in zip(self._bodies, self._rooms))
        tensors, self._sources = self._sources, []
        sources = [(at, n, s.data_ptr(), None if s.device.type == "cpu" else s) for at, n, s in tensors]
        addresses = [address for _, _, address, storage in sources if storage is None]
        if self._key is None or addresses != self._addresses:
            self._key, self._addresses = _Key(len(addresses) < len(sources)), addresses
        image = _RankImage(os.path.join(directory, self._name), "distcp", self._length, self._pieces, tensors,
                           self._fixups, self._layout)
        image.own(self._key, [(0, objects)] if objects else [], sources)
        return image


class _Key:
    """Stands for a layout and the addresses of its sources."""

    def __init__(self, foreign: bool) -> None:
        self.foreign = foreign  # whether some sources are on a device
        self.packed: Dict[int, bytes] = {}  # the engine's: the fix-ups as a table


class _RankImage(Image):
    """A .distcp file: in a buffer that held the same layout before, only objects and tensors are copied."""

    def own(self, key: _Key, objects: List[Tuple[int, bytes]], sources: List[Tuple[int, int, int, Any]]) -> None:
        self._plan = Plan(key, self.pieces, objects, sources, self.fixups, [], self.tensors)
        self.pieces = objects + self.pieces

    def plan(self) -> Plan:
        return self._plan


class _Template:
    """The torch.save record of a tensor on the CPU, without its contents."""

    def __init__(self, image: Image, payload: int, nbytes: int) -> None:
        self.pieces = image.pieces
        self.fixups = image.fixups
        self.length = image.length
        self.payload = payload
        self.nbytes = nbytes

    @classmethod
    def of(cls, dtype: Any, size: Any, stride: Any) -> Optional["_Template"]:
        """None when such a record has no place for the bytes of the tensor as they are."""
        import torch

        sample = torch.empty_strided(size, stride, dtype=dtype)
        image = torch_zip("item", sample)
        nbytes = sample.numel() * sample.element_size()
        places = [(at, n) for at, n, _ in image.tensors if n]
        if not nbytes and not places:
            return cls(image, 0, 0)
        return cls(image, places[0][0], nbytes) if [n for _, n in places] == [nbytes] else None


def _rank_and_size(group: Any) -> Tuple[int, int]:
    if group is None:
        return 0, 1
    import torch.distributed as dist

    return dist.get_rank(group), dist.get_world_size(group)


def _planner(state_dict: Mapping[str, Any], coordinator: bool) -> Any:
    from torch.distributed.checkpoint import DefaultSavePlanner

    plain = {k: v.state_dict() if _is_stateful(v) else v for k, v in state_dict.items()}
    planner = DefaultSavePlanner()
    planner.set_up_planner(state_dict=plain, is_coordinator=coordinator)
    return planner


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _structure(flat: Mapping[str, Any]) -> Tuple[Any, ...]:
    """Everything that a plan depends on. The values of objects are no part of it."""
    return tuple((name, _form(value)) for name, value in flat.items())


def _form(value: Any) -> Any:
    import torch

    if hasattr(value, "placements") and hasattr(value, "to_local"):
        local = value.to_local()
        return value.dtype, value.shape, value.placements, value.device_mesh, local.shape, local.stride()
    if hasattr(value, "local_shards"):
        shards = value.local_shards()
        return value.size(), [(list(s.metadata.shard_offsets), s.tensor.dtype, s.tensor.shape, s.tensor.stride())
                              for s in shards]
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.shape, value.layout
    return None


def _all_shared(plans: List[Any]) -> bool:
    """Whether each plan's items are shards or in the plan of rank 0 as well."""
    from torch.distributed.checkpoint.planner import WriteItemType

    first = {item.index for item in plans[0].items}
    return all(item.type == WriteItemType.SHARD or item.index in first for plan in plans[1:] for item in plan.items)


def _objects_to_lowest(plans: List[Any]) -> List[Any]:
    """Leaves each object to the lowest rank that has it: the size of rank 0's objects may change without notice."""
    import dataclasses

    seen: set = set()
    kept = []
    for plan in plans:
        items = [item for item in plan.items if not (_is_bytes(item) and item.index in seen)]
        seen.update(item.index for item in items if _is_bytes(item))
        kept.append(dataclasses.replace(plan, items=items))
    return kept


def _is_bytes(item: Any) -> bool:
    from torch.distributed.checkpoint.planner import WriteItemType

    return bool(item.type == WriteItemType.BYTE_IO)


def _tensor(planner: Any, item: Any) -> Any:
    """The tensor of an item, dense and ready to copy; None when only torch.save can store it."""
    import torch

    if _is_bytes(item):
        return None
    tensor = planner.resolve_data(item).detach()
    if hasattr(tensor, "wait"):
        tensor = tensor.wait()  # a collective is still filling it
    special = type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized
    if special or tensor.is_conj() or tensor.is_neg():
        return None
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
    return tensor if tensor.numel() in (0, span) else tensor.clone()


def _shape_of(tensor: Any) -> Any:
    return tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def _is_plain(value: Any) -> bool:
    if type(value) in _SCALARS:
        return True
    if type(value) in (list, tuple):
        return all(_is_plain(v) for v in value)
    return type(value) is dict and all(type(k) in _SCALARS and _is_plain(v) for k, v in value.items())


def _record(planner: Any, item: Any) -> bytes:
    import torch

    data = planner.resolve_data(item)
    if isinstance(data, torch.Tensor):
        buffer = io.BytesIO()
        torch.save(data.detach().cpu(), buffer)
        data = buffer
    return bytes(data.getvalue())


def _room(length: int) -> int:
    return _align(length + min(length // 2, _MAX_COMMENT // 2))


def _fits(body: bytes, room: int) -> bool:
    return 0 <= room - len(body) <= _MAX_COMMENT


def _padded(body: bytes, room: int) -> bytes:
    """Fills a record up to its place, with a zip comment: the place stays when the value changes a little."""
    spare = room - len(body)
    if spare == 0:
        return body
    return body[:-2] + spare.to_bytes(2, "little") + bytes(spare)


def _align(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


def _moved(row: Tuple[int, int, int, int], by: int) -> Tuple[int, int, int, int]:
    payload, length, dst1, dst2 = row
    return payload + by, length, dst1 + by if dst1 else 0, dst2 + by if dst2 else 0


def _merged(pieces: List[Tuple[int, bytes]]) -> List[Tuple[int, bytes]]:
    """Joins pieces between which there is nothing but padding."""
    joined: List[Tuple[int, bytearray]] = []
    for at, data in sorted(pieces, key=lambda piece: piece[0]):
        if joined and 0 <= at - joined[-1][0] - len(joined[-1][1]) < _ALIGN:
            start, body = joined[-1]
            body.extend(bytes(at - start - len(body)))
            body.extend(data)
        else:
            joined.append((at, bytearray(data)))
    return [(at, bytes(body)) for at, body in joined]


def _filled(pieces: List[Tuple[int, bytes]], spans: List[Tuple[int, int]], start: int,
            length: int) -> List[Tuple[int, bytes]]:
    """Adds zeros for the gaps between start and length that neither pieces nor spans cover."""
    taken = sorted([(at, len(data)) for at, data in pieces] + spans)
    zeros, end = [], start
    for at, n in taken + [(length, 0)]:
        if at > end:
            zeros.append((end, bytes(at - end)))
        end = max(end, at + n)
    return _merged(pieces + zeros)


def _attempt(f: Callable[[], Any]) -> Any:
    try:
        return f()
    except Exception as error:  # travels to all ranks and is raised there
        return RuntimeError("%s: %s" % (type(error).__name__, error))


def _checked(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


def reader(loaded: Any, group: Any = None) -> Any:
    """The StorageReader for the result of Engine.load. All ranks together, with the same group as at the save."""
    require_torch()
    if loaded.source == "disk":
        return disk_reader(loaded)
    import torch.distributed as dist

    found = [(os.path.dirname(path), bytes(view)) for path, view in loaded.files.items()
             if os.path.basename(path) == _METADATA]
    box = [found[0] if found else None]
    if group is not None:
        dist.broadcast_object_list(box, src=0, group=group)
    if box[0] is None:
        raise RuntimeError("step %d in memory has no %s: it was not saved by an FSDP shard checkpointer"
                           % (loaded.step, _METADATA))
    return memory_reader(loaded.files, box[0][0], pickle.loads(box[0][1]), group)


def disk_reader(loaded: Any) -> Any:
    """The stock reader on the directory of a committed step; it serves any world size."""
    from torch.distributed.checkpoint import FileSystemReader

    names = [f["path"] for f in loaded.manifest["files"] if os.path.basename(f["path"]) == _METADATA]
    if not names:
        raise RuntimeError("step %d in %s has no %s: it was not saved by an FSDP shard checkpointer"
                           % (loaded.step, loaded.dir, _METADATA))
    return FileSystemReader(os.path.join(loaded.dir, os.path.dirname(names[0])))


def memory_reader(files: Mapping[str, Any], directory: str, metadata: Any, group: Any = None) -> Any:
    """A StorageReader over the files {path: memoryview} of this rank; ranks exchange the files that they lack."""
    from torch.distributed.checkpoint import StorageReader

    return type("MemoryReader", (_MemoryReader, StorageReader), {})(files, directory, metadata, group)


class _MemoryReader:
    """The reader of memory_reader. read_data is collective, as torch.distributed.checkpoint calls it on all ranks."""

    def __init__(self, files: Mapping[str, Any], directory: str, metadata: Any, group: Any) -> None:
        self._files = {os.path.relpath(path, directory or "."): view for path, view in files.items()}
        self._metadata = metadata
        self._group = group
        self._rank, self._world = _rank_and_size(group)
        self._entries: Any = metadata.storage_data
        self.checkpoint_id = directory

    def reset(self, checkpoint_id: Any = None) -> None:
        """Does nothing: the reader is for one save."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return copy.copy(self._metadata)

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._entries = metadata.storage_data

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: List[Any]) -> List[Any]:
        return plans

    def read_data(self, plan: Any, planner: Any) -> Any:
        from torch.futures import Future

        places = [self._place(item) for item in plan.items]
        fetched = self._fetch(sorted({place for place in places if place[0] not in self._files}))
        for item, place in zip(plan.items, places):
            name, offset, length = place
            view = fetched[place] if place in fetched else self._files[name][offset:offset + length]
            _deliver(planner, item, view)
        done: Any = Future()
        done.set_result(None)
        return done

    def _place(self, item: Any) -> Tuple[str, int, int]:
        info = self._entries[item.storage_index]
        return info.relative_path, info.offset, info.length

    def _fetch(self, missing: List[Tuple[str, int, int]]) -> Dict[Tuple[str, int, int], Any]:
        """The bytes that other ranks have."""
        if self._world == 1:
            if missing:
                raise RuntimeError("%s is not in memory: load from disk" % missing[0][0])
            return {}
        import torch.distributed as dist

        everyone: List[Any] = [None] * self._world
        dist.all_gather_object(everyone, (sorted(self._files), missing), group=self._group)
        owner = {name: rank for rank, (names, _) in enumerate(everyone) for name in names}
        for _, wanted in everyone:
            for name, _, _ in wanted:
                if name not in owner:
                    raise RuntimeError("%s is in no rank's memory: load from disk" % name)
        sent = [self._send(rank, [p for p in wanted if owner[p[0]] == self._rank])
                for rank, (_, wanted) in enumerate(everyone)]
        got: Dict[Tuple[str, int, int], Any] = {}
        for rank in range(self._world):
            got.update(self._receive(rank, [p for p in missing if owner[p[0]] == rank]))
        for message in sent:
            if message is not None:
                message[0].wait()
        return got

    def _send(self, rank: int, places: List[Tuple[str, int, int]]) -> Any:
        if not places:
            return None
        import torch
        import torch.distributed as dist

        body = bytearray().join(self._files[name][offset:offset + length] for name, offset, length in places)
        tensor = torch.frombuffer(body, dtype=torch.uint8)
        return dist.isend(tensor, dst=rank, group=self._group), tensor

    def _receive(self, rank: int, places: List[Tuple[str, int, int]]) -> Dict[Tuple[str, int, int], Any]:
        if not places:
            return {}
        import torch
        import torch.distributed as dist

        body = bytearray(sum(length for _, _, length in places))
        dist.recv(torch.frombuffer(body, dtype=torch.uint8), src=rank, group=self._group)
        views, start = {}, 0
        for place in places:
            views[place] = memoryview(body)[start:start + place[2]]
            start += place[2]
        return views


def _deliver(planner: Any, item: Any, view: Any) -> None:
    from torch.distributed.checkpoint.planner import LoadItemType

    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(bytes(view)))
        return
    source = torch_load(view)
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths)):
        source = source.narrow(dim, offset, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(source)
    planner.commit_tensor(item, target)


def load(state_dict: Dict[str, Any], storage_reader: Any) -> None:
    """torch.distributed.checkpoint.load under the name that this torch has for it."""
    import torch.distributed.checkpoint as checkpoint

    load_ = getattr(checkpoint, "load", None) or checkpoint.load_state_dict
    planner = checkpoint.DefaultLoadPlanner()
    load_(state_dict, storage_reader=storage_reader, planner=planner)
    state_dict.update(planner.original_state_dict)  # torch 2.3 forgets objects at the top
