"""What the adapters for training frameworks share.

A framework names its files itself and writes them with torch.save. An adapter catches these calls, gives the objects
to the engine, and answers the framework's loads from what the engine finds.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import types
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

from .dcp import host_group
from .engine import Engine, Loaded, StorageType, checked_dir
from .image import Image, torch_load, torch_zip

Want = Callable[[int, List[str]], Optional[List[str]]]

_PATIENCE = 1800  # seconds that a rank waits for another
_CHUNK = 16 << 20  # bytes per message when a file goes from rank to rank
_swapping = threading.RLock()  # one replacement of module names at a time


class Capture:
    """The files below a directory that a framework saves during a call. Nothing is written."""

    def __init__(self, directory: Union[str, "os.PathLike[str]"]) -> None:
        self.directory = os.path.abspath(directory)
        self.files: Dict[str, Any] = {}

    def path_in(self, path: Any) -> Optional[str]:
        """The path relative to the directory; None for what lies elsewhere."""
        return _path_in(self.directory, path)

    def save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """Stands in for torch.save. What is not for a file below the directory goes to torch.save."""
        path = self.path_in(f)
        if path is None:
            import torch

            torch.save(obj, f, *args, **kwargs)
        else:
            self.files[path] = obj


class Found:
    """A checkpoint that a framework is about to load, shown to it as a directory of empty files.

    Frameworks look for files by name before they load them. A checkpoint in memory has no files, so they get a
    directory of the same shape, and load() stands in for torch.load.
    """

    def __init__(self, loaded: Loaded, names: Iterable[str]) -> None:
        self.loaded = loaded
        self.names = sorted(n for n in names if _path_in("/x", os.path.join("/x", n)) is not None)
        self.directory = ""

    @contextlib.contextmanager
    def shown(self, trackers: Dict[str, str]) -> Iterator[str]:
        """Makes the directory, with tracker files, for the duration."""
        with tempfile.TemporaryDirectory(prefix="dlrover-%s-" % self.loaded.source) as directory:
            for path, text in [(name, "") for name in self.names] + list(trackers.items()):
                full = os.path.join(directory, path)
                os.makedirs(os.path.dirname(full), exist_ok=True)
                with open(full, "w") as f:
                    f.write(text)
            self.directory = directory
            yield directory

    def file(self, f: Any) -> Any:
        """The real file of a checkpoint on disk, for the name of an empty one; other names stay as they are."""
        path = _path_in(self.directory, f)
        return f if path is None else os.path.join(self.loaded.dir, path)

    def load(self, f: Any, *args: Any, **kwargs: Any) -> Any:
        """Stands in for torch.load. What is not for a file below the directory goes to torch.load."""
        import torch

        path = _path_in(self.directory, f)
        if path is None or self.loaded.source == "disk":
            return torch.load(self.file(f), *args, **kwargs)
        if path not in self.loaded.files:
            raise FileNotFoundError("%s of step %d is not in the memory of this rank" % (path, self.loaded.step))
        return torch_load(self.loaded.files[path])


class Checkpointer:
    """The checkpoints of one directory, to which every rank contributes the files that it would write itself."""

    def __init__(self, directory: Union[str, "os.PathLike[str]"], framework: str, **settings: Any) -> None:
        self.directory = checked_dir(directory)
        self.framework = framework
        self.settings = settings
        self.engine = self._engine()
        self._group: Any = None
        self._caches: Dict[str, dict] = {}

    def adjust(self, **settings: Any) -> None:
        """Makes the settings of the latest save count; a load before it may have been called without them."""
        if _comparable(settings) != _comparable(self.settings):
            self.settings = settings
            latest, self.engine = self.engine.latest_step, self._engine()
            self.engine.latest_step = latest

    def _engine(self) -> Engine:
        rank, world = _rank_and_world()
        return Engine(self.directory, self.framework, shard=rank, shards=world, primary=True, **self.settings)

    def save(self, step: int, files: Dict[str, Any], storage_type: StorageType,
             trackers: Sequence[Tuple[str, str]]) -> bool:
        """Saves objects under their paths. All ranks call it, also those without files."""
        def images() -> List[Image]:
            return [torch_zip(path, obj, self._caches.setdefault(os.path.basename(path), {}))
                    for path, obj in sorted(files.items())]

        return self.engine.save(step, images, storage_type, trackers)

    def find(self, want: Want, mode: str = "memory-first") -> Optional[Found]:
        """The newest checkpoint that all ranks can load; all ranks call it together.

        want says which files this rank is going to load from a checkpoint in memory, given the step and the names of
        the files of all ranks. Those that it did not save itself come from a rank that did. Where that is not
        possible, or want returns None on any rank, the disk is used.
        """
        loaded = self.engine.load(mode)
        if loaded is not None and loaded.source == "memory":
            step = loaded.step
            names = _borrow(loaded.files, lambda names: want(step, names), self._gloo())
            if names is not None:
                return Found(loaded, names)
            loaded = self.engine.load("disk") if mode != "memory" else None
        if loaded is None:
            return None
        return Found(loaded, [f["path"] for f in loaded.manifest["files"]])

    def _gloo(self) -> Any:
        """A group of all ranks that can send from the host's memory.

        It is never destroyed: torch 2.1 then waits for the group's threads while it holds the interpreter's lock, for
        which a thread that lets go of a tensor may be waiting.
        """
        if self._group is None:
            self._group = host_group(_PATIENCE)
        return self._group


def check_storage_type(storage_type: Any) -> None:
    """Raises ValueError for anything but a StorageType."""
    if storage_type not in (StorageType.MEMORY, StorageType.DISK):
        raise ValueError("storage_type is %r, it must be StorageType.MEMORY or StorageType.DISK" % (storage_type,))


@contextlib.contextmanager
def names_replaced(modules: Iterable[types.ModuleType], names: Dict[str, Callable[[Any], Any]]) -> Iterator[None]:
    """Replaces global names of modules, for the calling thread and the duration.

    names: {name: function that gets the present value and returns the new one}. Modules that lack a name are left
    alone. Only the name in that module changes: what it stands for is not touched, and other modules do not notice.
    Other threads that run code of the module get the present value.
    """
    with _swapping:
        undo: List[Tuple[types.ModuleType, str, Any, Any]] = []
        try:
            for module in modules:
                for name in names:
                    old = vars(module).get(name)
                    if old is not None:
                        new = _for_this_thread(old, names[name](old))
                        undo.append((module, name, old, new))
                        setattr(module, name, new)
            yield
        finally:
            for module, name, old, new in reversed(undo):
                if vars(module).get(name) is new:
                    setattr(module, name, old)


def module_with(module: types.ModuleType, **names: Any) -> "_ModuleView":
    """A module that has other values for some names and is the given one for all else."""
    return _ModuleView(module, names)


class _ModuleView(types.ModuleType):
    def __init__(self, module: types.ModuleType, names: Dict[str, Any]) -> None:
        super().__init__(module.__name__)
        vars(self)["_viewed"] = module
        vars(self)["_names"] = names

    def __getattribute__(self, name: str) -> Any:
        own = types.ModuleType.__getattribute__(self, "__dict__")
        if name == "__dict__":
            return own
        if name in own.get("_names", ()):
            return own["_names"][name]
        return getattr(own["_viewed"], name) if "_viewed" in own else types.ModuleType.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_viewed"], name, value)

    def __dir__(self) -> List[str]:
        return dir(vars(self)["_viewed"])


def _for_this_thread(old: Any, new: Any) -> Any:
    me = threading.get_ident()
    if isinstance(new, _ModuleView):
        theirs = vars(new)["_names"]
        mine = {name: _for_this_thread(getattr(old, name), value) for name, value in theirs.items()}
        return _ModuleView(old, mine)
    return lambda *args, **kwargs: (new if threading.get_ident() == me else old)(*args, **kwargs)


def _comparable(settings: Dict[str, Any]) -> Dict[str, Any]:
    """Settings with what a deletion strategy does in place of the object, of which each call may bring a new one."""
    strategy = settings.get("deletion_strategy")
    rule = strategy.retention() if strategy is not None and hasattr(strategy, "retention") else None
    return dict(settings, deletion_strategy=rule or type(strategy))


def _path_in(directory: str, path: Any) -> Optional[str]:
    if not isinstance(path, (str, os.PathLike)):
        return None
    relative = os.path.relpath(os.path.abspath(os.fspath(path)), directory)
    return None if relative == ".." or relative.startswith("../") else relative


def _rank_and_world() -> Tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _borrow(files: Dict[str, memoryview], want: Callable[[List[str]], Optional[List[str]]],
            group: Any) -> Optional[List[str]]:
    """Adds to files those wanted ones that only other ranks have; all ranks call it together.

    Returns the names of the files of all ranks; None, on every rank, when a file is nowhere or a rank wants None.
    """
    rank, world = _rank_and_world()
    have = _gather({path: len(view) for path, view in files.items()}, world, group)
    names = sorted({path for one in have for path in one})
    lacking = _lacking(have, _gather(want(names), world, group))
    for path, owner, takers in lacking or ():
        if rank == owner or rank in takers:
            files[path] = _pass_on(files.get(path), have[owner][path], [owner] + takers, rank, group)
    return None if lacking is None else names


def _lacking(have: List[dict], want: List[Optional[List[str]]]) -> Optional[List[Tuple[str, int, List[int]]]]:
    """(path, rank that has it, ranks that lack it), the same on all ranks; None when it cannot be done."""
    owners = {path: rank for rank, one in reversed(list(enumerate(have))) for path in one}
    takers: Dict[str, List[int]] = {}
    for rank, paths in enumerate(want):
        if paths is None or any(path not in owners for path in paths):
            return None
        for path in paths:
            if path not in have[rank]:
                takers.setdefault(path, []).append(rank)
    return [(path, owners[path], takers[path]) for path in sorted(takers)]


def _gather(value: Any, world: int, group: Any) -> List[Any]:
    """What each rank says, as JSON: nothing of another process is ever unpickled."""
    if world == 1:
        return [value]
    import torch
    import torch.distributed as dist

    data = bytearray(json.dumps(value).encode())
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = max(int(size) for size in sizes)
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world)]
    padded = torch.frombuffer(data + bytearray(longest - len(data)), dtype=torch.uint8)
    dist.all_gather(texts, padded, group=group)
    return [json.loads(bytes(text[:int(size)].tolist())) for text, size in zip(texts, sizes)]


def _pass_on(view: Optional[memoryview], length: int, chain: List[int], rank: int, group: Any) -> memoryview:
    """Moves a file along a chain of ranks, a chunk at a time, so that each link carries it once."""
    import torch
    import torch.distributed as dist

    at = chain.index(rank)
    buffer = view if view is not None else memoryview(bytearray(length))
    for start in range(0, length, _CHUNK):
        part = torch.frombuffer(buffer, dtype=torch.uint8, offset=start, count=min(_CHUNK, length - start))
        if at > 0:
            dist.recv(part, chain[at - 1], group=group)
        if at + 1 < len(chain):
            dist.send(part, chain[at + 1], group=group)
    return buffer
