"""A guess of the size of the first save, so that its memory is ready in time."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any, Callable, Dict, Iterator, List

from . import sync

_waiting: List["_Sum"] = []  # those that want to hear of steps
_hooked = False


def from_disk(dir: str, shard: int, shards: int) -> int:
    """Bytes of this shard in the newest checkpoint, 0 = unknown."""
    for m in sync.manifests(dir)[0]:
        if m["shards"] == shards:
            return sum(f["size"] for f in m["files"] if f["shard"] == shard)
    return 0


def from_steps(tell: Callable[[int], None]) -> None:
    """Calls tell with the bytes that an optimizer updates and keeps, after its first step; with the sum when another
    one has stepped. A second step of the same optimizer ends that.

    tell is called in the thread that steps, and reads nothing else of the process: code of the user's, such as a
    destructor or a property, must not run because of us. It needs hear_steps.
    """
    _waiting.append(_Sum(tell))


class _Sum:
    """The optimizers that have stepped so far."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._known: Dict[int, int] = {}  # bytes by the optimizer's id: no reference is kept

    def stepped(self, optimizer: Any) -> None:
        if id(optimizer) in self._known:
            _waiting.remove(self)
            return
        self._known[id(optimizer)] = _optimizer_bytes(optimizer)
        self._tell(sum(self._known.values()))


def hear_steps() -> None:
    """Hears of the steps of all optimizers from now on; to be called by a thread of the user's. Version 2 of PyTorch
    has hooks for that, 1.13 a method that does nothing."""
    global _hooked
    module = sys.modules.get("torch.optim.optimizer")
    if module is None or _hooked:
        return
    _hooked = True
    compiling = getattr(getattr(sys.modules["torch"], "compiler", None), "is_compiling", None) or (lambda: False)

    def hook(optimizer: Any, *_: Any) -> None:
        if not compiling() and _waiting:
            _stepped(optimizer)

    if hasattr(module, "register_optimizer_step_post_hook"):
        module.register_optimizer_step_post_hook(hook)
        return
    before = module.Optimizer._optimizer_step_code

    def _optimizer_step_code(self: Any) -> None:
        before(self)
        hook(self)

    module.Optimizer._optimizer_step_code = _optimizer_step_code


def _stepped(optimizer: Any) -> None:
    for s in list(_waiting):
        try:
            s.stepped(optimizer)
        except Exception:  # an optimizer of a strange kind: the first save takes longer
            if s in _waiting:
                _waiting.remove(s)


def _optimizer_bytes(optimizer: Any) -> int:
    own = object.__getattribute__(optimizer, "__dict__")
    params = [p for g in _items(own.get("param_groups")) if type(g) is dict for p in _items(g.get("params"))]
    kept = [t for s in _items(own.get("state")) for t in _items(s)]
    return sum(_nbytes(t) for t in params + kept)


def _items(of: Any) -> Iterator[Any]:
    """The elements of a list, or the values of a dict; of nothing else, which may have code of its own."""
    if type(of) is list:
        return iter(of)
    return iter(of.values()) if type(of) in (dict, defaultdict) else iter(())


def _nbytes(t: Any) -> int:
    torch = sys.modules["torch"]
    return int(t.numel() * t.element_size()) if type(t) in (torch.Tensor, torch.nn.Parameter) else 0
