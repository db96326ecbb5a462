"""DLRover's checkpoint API, served by dlrover_ckpt.

The modules here take the place of those of an installed ``dlrover``; its other modules stay importable. With
DLROVER_CKPT_CLIENT=upstream in the environment this package steps aside and the installed one is used as it is.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pkgutil import extend_path


def _step_aside(others):
    """Puts the installed package in our place."""
    spec = PathFinder.find_spec("dlrover", [os.path.dirname(path) for path in others])
    if spec is None:
        raise ImportError("DLROVER_CKPT_CLIENT=upstream, but no other dlrover is installed: "
                          "install it (pip install dlrover) or unset DLROVER_CKPT_CLIENT")
    module = module_from_spec(spec)
    sys.modules["dlrover"] = module
    if spec.loader is not None:
        spec.loader.exec_module(module)


def _tell(others):
    if os.environ.get("RANK", "0") == "0":
        import logging

        logging.getLogger("dlrover").warning(
            "flash checkpoints are served by dlrover_ckpt, not by the dlrover in %s "
            "(DLROVER_CKPT_CLIENT=upstream selects that one)", os.path.dirname(others[0]))


def _others(path):
    own = os.path.realpath(os.path.dirname(__file__))
    return [p for p in path if os.path.realpath(p) != own]


__path__ = extend_path(__path__, __name__)
if os.environ.get("DLROVER_CKPT_CLIENT") == "upstream":
    _step_aside(_others(__path__))
elif _others(__path__):
    _tell(_others(__path__))
