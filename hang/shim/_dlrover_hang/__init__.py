"""Tells the observer of this node how far this worker is. It is in no file of the job: sitecustomize installs it.

The page is claimed late, by the process that trains: every Python of the job runs this, and most of them, such as the
workers of data loaders, only inherit the environment of one that does.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # to import it costs more than all the rest
    from typing import Any, Dict, Set

# What is watched, by the module that has it: a function of hooks.py, or a phase, and what it wraps there.
_WATCHED = {
    "torch.optim.optimizer": ("steps",),
    "torch.nn.modules.module": ("evaluation",),
    "torch.distributed.distributed_c10d": ("process_groups", "new_group", "split_group"),
    "torch.utils.data.dataloader": ("data", "_BaseDataLoaderIter.__next__", "DataLoader.__iter__"),
    "torch.serialization": ("checkpoint", "save", "load"),
    "torch.distributed.checkpoint.state_dict_saver": ("checkpoint", "save", "async_save", "save_state_dict"),
    "torch.distributed.checkpoint.state_dict_loader": ("checkpoint", "load", "load_state_dict"),
    "torch.utils.cpp_extension": ("build", "load", "load_inline"),
    "torch._dynamo.callback": ("compilations",),
    "torch._dynamo.convert_frame": ("dynamo",),
    "triton.compiler.compiler": ("compile", "compile"),
    "safetensors.torch": ("checkpoint", "save_file", "load_file", "save_model", "load_model"),
    "dlrover_ckpt.engine": ("checkpoint", "Engine.save", "Engine.load"),
    "deepspeed.runtime.engine": (
        "checkpoint", "DeepSpeedEngine.save_checkpoint", "DeepSpeedEngine.load_checkpoint"),
    "megatron.checkpointing": ("checkpoint", "save_checkpoint", "load_checkpoint"),
    "megatron.training.checkpointing": ("checkpoint", "save_checkpoint", "load_checkpoint"),
}


environ: Dict[str, str] = {}  # when the interpreter started: scripts change their own
born = 0  # the pid then


class _Finder:
    """Finds what the finders after it find, and lets the hooks see the modules that are watched once they have run."""

    _finding: Set[str] = set()

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _WATCHED or name in cls._finding:
            return None
        cls._finding.add(name)  # another finder may ask all of them, this one included
        try:
            spec = cls._others(name, path, target)
        finally:
            cls._finding.discard(name)
        if spec is not None:
            _observe(spec.loader)
        return spec

    @classmethod
    def _others(cls, name: str, path: Any, target: Any) -> Any:
        finders = list(sys.meta_path)
        for finder in finders[finders.index(cls) + 1:] if cls in finders else finders:  # type: ignore[arg-type]
            if hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


def _observe(loader: Any) -> None:
    """The loader stays what it is, for whoever asks the module for it."""
    try:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            _patch(module)

        loader.exec_module = exec_module
    except Exception:
        pass  # a loader of a strange kind: this module is not watched


def _patch(module: Any) -> None:
    try:
        what = _WATCHED.get(module.__name__)
        if what:
            from . import hooks

            hooks.patch(module, *what)
    except Exception:
        pass


def install() -> None:
    """Watches the modules of _WATCHED, those that somebody has imported already included. It imports none."""
    if _Finder in sys.meta_path:
        return
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
    begin()
    for name in _WATCHED:
        if name in sys.modules:
            _patch(sys.modules[name])


def begin() -> None:
    """The process is what its environment says. It begins so; and a fork of one that imports for others does later."""
    global born
    born = os.getpid()
    environ.clear()
    environ.update((k, v) for k, v in os.environ.items() if k.endswith("RANK") or k in ("WORLD_SIZE", "DLROVER_HANG_DIR"))
    if os.environ.get("DLROVER_HANG_TRACER"):
        from . import process

        process.allow_tracer(os.environ)
