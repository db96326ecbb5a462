"""DLRover's checkpoint API, served by dlrover_ckpt, and its elastic training.

The modules for checkpoints take the place of those of an installed DLRover; its other modules stay, those for elastic
training as well. With
DLROVER_CKPT_CLIENT=upstream in the environment this package gives way to the installed one. It gives way by itself to a
``dlrover`` that is not DLRover, but a package or module of the user's own.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from pkgutil import extend_path

TYPE_CHECKING = False  # typing takes longer to import than this package
if TYPE_CHECKING:
    from typing import Any


def _ours(path: Any) -> bool:
    """Whether a directory of sys.path has this package, or a copy of it."""
    return isinstance(path, str) and os.path.isfile(os.path.join(path, "dlrover_ckpt", "__init__.py"))


def _other() -> Any:
    """The spec of the dlrover that would be imported without us; None: there is none, or a directory without code."""
    path = [p for p in sys.path if not _ours(p)]
    for finder in sys.meta_path:  # editable installations have finders of their own
        find = getattr(finder, "find_spec", None)
        spec = find and find("dlrover", path if finder is PathFinder else None)
        if spec is not None and spec.has_location and not _ours(os.path.dirname(os.path.dirname(spec.origin))):
            return spec
    return None


def _is_upstream(spec: Any) -> bool:
    inside = spec.submodule_search_locations
    return inside is not None and all(PathFinder.find_spec("dlrover." + p, inside) for p in ("python", "trainer"))


def _give_way() -> None:
    """Replaces this package by the other one, as if we had never been on sys.path. An importer of ours gets the entry
    of sys.modules afterwards; the lock of the import is this thread's already."""
    sys.path = [p for p in sys.path if not _ours(p)]
    del sys.modules["dlrover"]
    import_module("dlrover")


def _tell(where: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        import logging

        logging.getLogger("dlrover").warning(
            "flash checkpoints are served by dlrover_ckpt, not by the dlrover in %s "
            "(DLROVER_CKPT_CLIENT=upstream selects that one)", os.path.dirname(where))


class _Missing:
    """The last finder, where no DLRover is installed: its error lists the requirements of modules that are not here. A
    caller that only checks whether there is a module, as importlib.util.find_spec does, gets None as ever."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith("dlrover.") and _importing():
            # By the name of the missing requirement. With that of the module, "from package import module" would
            # replace the text.
            raise ModuleNotFoundError("No module named %r: dlrover-run brings DLRover's modules for checkpoints and "
                                      "elastic training only; the others need pip install dlrover" % name,
                                      name="dlrover")
        return None


def _importing() -> bool:
    """Whether an import statement, or import_module, has asked the finder that calls this."""
    try:
        caller = sys._getframe(3)  # below it: the search of sys.meta_path, the finder, this function
    except (AttributeError, ValueError):  # another Python, or none
        return False
    return caller.f_code.co_name == "_find_and_load_unlocked"


def _begin() -> None:
    other = _other()
    if os.environ.get("DLROVER_CKPT_CLIENT") == "upstream":
        if other is None:
            raise ImportError("DLROVER_CKPT_CLIENT=upstream, but no other dlrover is installed: "
                              "install it (pip install dlrover) or unset DLROVER_CKPT_CLIENT")
        _give_way()
    elif other is None:
        sys.meta_path.append(_Missing)
    elif _is_upstream(other):
        where = list(other.submodule_search_locations)
        __path__.extend(p for p in where if p not in __path__)
        _tell(where[0])
    else:
        _give_way()


__path__ = extend_path(__path__, __name__)
_begin()
