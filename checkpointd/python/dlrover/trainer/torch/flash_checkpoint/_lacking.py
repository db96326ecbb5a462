"""Names of DLRover's that have no place here."""

from __future__ import annotations

from typing import Any, Callable, Dict


def lacking(module: str, names: Dict[str, str]) -> Callable[[str], Any]:
    """A module's __getattr__ that says for each of these names what to use instead."""
    def get(name: str) -> Any:
        if name in names:
            raise ImportError("%s.%s is not part of dlrover-run: %s" % (module, name, names[name]))
        raise AttributeError("module %r has no attribute %r" % (module, name))

    return get
