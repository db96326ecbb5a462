"""How large the first save will be, guessed before it: so that its memory is ready when it comes."""

from __future__ import annotations

import gc
import sys
from typing import Any, Dict

from . import sync


def from_disk(dir: str, shard: int, shards: int) -> int:
    """Bytes of this shard in the newest checkpoint, 0 = unknown."""
    for m in sync.manifests(dir)[0]:
        if m["shards"] == shards:
            return sum(f["size"] for f in m["files"] if f["shard"] == shard)
    return 0


def from_modules() -> int:
    """Bytes of all parameters and buffers in the process and of what their optimizers will keep, 0 = none found.

    Looks at every object once. An object's own idea of its class is not asked: that may run its code.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn") or not hasattr(torch, "optim"):
        return 0
    module, optimizer = torch.nn.Module, torch.optim.Optimizer
    found = [o for o in gc.get_objects() if issubclass(type(o), (module, optimizer))]
    tensors: Dict[int, Any] = {}
    for o in found:
        if isinstance(o, module):
            for group in (o._parameters, o._buffers):
                tensors.update((id(t), t) for t in list(group.values()) if t is not None)
    size = sum(_nbytes(t) for t in tensors.values())
    return size + sum(_optimizer_bytes(o) for o in found if isinstance(o, optimizer))


def _nbytes(t: Any) -> int:
    t = getattr(t, "_local_tensor", t)
    try:
        return int(t.numel() * t.element_size())
    except (RuntimeError, ValueError):  # not yet materialised
        return 0


def _optimizer_bytes(o: Any) -> int:
    return sum(_nbytes(p) * _copies(type(o).__name__.lower(), g) for g in o.param_groups for p in g["params"])


def _copies(name: str, group: Dict[str, Any]) -> int:
    """How many tensors of its size an optimizer keeps for a parameter."""
    if "adam" in name or "lamb" in name:
        return 3 if group.get("amsgrad") else 2
    if name == "sgd":
        return 1 if group.get("momentum") else 0
    return 1
