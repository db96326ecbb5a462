"""Names of DLRover's that are made on demand, or that have no place here."""

from __future__ import annotations

from typing import Any, Callable, Dict


def lacking(module: str, names: Dict[str, str]) -> Callable[[str], Any]:
    """A module's __getattr__ that names a replacement for each of these names."""
    def get(name: str) -> Any:
        if name in names:
            raise ImportError("%s.%s is not part of dlrover-run: %s" % (module, name, names[name]))
        raise AttributeError("module %r has no attribute %r" % (module, name))

    return get


def with_native(others: Callable[[str], Any]) -> Callable[[str], Any]:
    """A module's __getattr__ that has torch's own save and load: programs put ours in their place, and take it back."""
    def get(name: str) -> Any:
        if name not in ("torch_native_save", "torch_native_load"):
            return others(name)
        from torch import serialization

        return getattr(serialization, name[len("torch_native_"):])

    return get
