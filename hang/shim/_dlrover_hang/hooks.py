"""What is put around functions of PyTorch and of others, once their modules have run.

A function is called exactly as without us, and its results and exceptions are its own. Where torch.compile traces what
is put around it, it finds nothing there but the call.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any, Callable

from . import page, worker

_phases = {"data": page.DATA, "checkpoint": page.CHECKPOINT, "build": page.BUILD, "compile": page.COMPILE}
_compiled = False  # something has been: steps may be compiled, and not be seen


def _compiling() -> bool:
    """Whether torch.compile runs this to find out what it does. Replaced where there is torch.compile."""
    return False


def patch(module: Any, what: str, *names: str) -> None:
    """Watches a module. what: a phase, and the names are of functions in it; or a function of this module."""
    if what in _phases:
        for name in names:
            _wrap(module, name, _phases[what])
    else:
        globals()[what](module, *names)


def _wrap(module: Any, name: str, phase: int) -> None:
    """Puts a phase around a function of a module, or a method of a class there, if it has such a one."""
    owner = module
    *classes, name = name.split(".")
    for c in classes:
        owner = getattr(owner, c, None)
    function = vars(owner).get(name) if owner is not None else None
    if isinstance(function, types.FunctionType) and not hasattr(function, "_dlrover_hang"):
        setattr(owner, name, _during(phase, function))


def _during(phase: int, function: Callable[..., Any]) -> Callable[..., Any]:
    enter, leave = worker.enter, worker.leave

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        depth = enter(phase)
        try:
            return function(*args, **kwargs)
        finally:
            if depth:
                leave(depth)

    return _marked(wrapper)


def _marked(wrapper: Any) -> Any:
    """torch.compile does not look into it."""
    wrapper._torchdynamo_disable = wrapper._dlrover_hang = True
    return wrapper


# Variables of the flight recorder: the older name, the present one, and since which version PyTorch knows that.
_RENAMED = (
    ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE", (2, 9)),
    ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE", (2, 9)),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_ON_TIMEOUT", (2, 15)),
)


def _forget_older_names() -> None:
    """The launcher does not know which PyTorch the job has, and sets both names. A newer one warns about the older."""
    try:
        version = tuple(int(n) for n in sys.modules["torch"].__version__.split(".")[:2])
        for old, new, since in _RENAMED:
            if version >= since and old in os.environ and os.environ[old] == os.environ.get(new):
                del os.environ[old]
    except Exception:
        pass  # then it warns


def process_groups(module: Any, *names: str) -> None:
    _forget_older_names()
    for name in names:
        _wrap(module, name, page.INIT)
    init = getattr(module, "init_process_group", None)
    if init is None or hasattr(init, "_dlrover_hang"):
        return

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        _forget_older_names()  # again: a warm worker gets its variables after the imports
        depth, made = worker.begin_world(), False
        try:
            result = init(*args, **kwargs)
            made = True
            return result
        finally:
            worker.end_world(depth, made)

    module.init_process_group = _marked(init_process_group)


def steps(module: Any) -> None:
    """Counts what optimizers do. Version 2 has hooks for all of them, 1.13 a method that does nothing."""
    if hasattr(module.Optimizer, "_dlrover_hang"):
        return
    module.Optimizer._dlrover_hang = True
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is not None:

        def post_hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not _compiling():
                worker.step()

        register(post_hook)
        _wrap_zero_grad(module.Optimizer)
        return

    def _optimizer_step_code(self: Any) -> None:
        worker.step()

    module.Optimizer._optimizer_step_code = _optimizer_step_code


def _wrap_zero_grad(optimizer: Any) -> None:
    """Steps that are compiled run none of this. Those that are between two zero_grads of an optimizer are counted."""
    zero_grad = optimizer.zero_grad

    @functools.wraps(zero_grad)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _compiled and not _compiling():
            worker.zeroed(id(self))
        return zero_grad(self, *args, **kwargs)

    optimizer.zero_grad = wrapper


def evaluation(module: Any) -> None:
    cls = module.Module
    eval_mode, train_mode = cls.eval, cls.train
    if hasattr(eval_mode, "_dlrover_hang"):
        return

    @functools.wraps(eval_mode)
    def eval(self: Any) -> Any:
        if not _compiling():
            worker.eval_begins()
        return eval_mode(self)

    @functools.wraps(train_mode)
    def train(self: Any, mode: bool = True) -> Any:
        if mode and not _compiling():
            worker.eval_ends()
        return train_mode(self, mode)

    eval._dlrover_hang = True  # type: ignore[attr-defined]
    cls.eval, cls.train = eval, train


def dynamo(module: Any) -> None:
    """torch.compile is there. Its versions before 2.3 have no callbacks."""
    global _compiling
    torch = sys.modules["torch"]
    compiler = getattr(torch, "compiler", None) or sys.modules.get("torch._dynamo.external_utils")
    _compiling = getattr(compiler, "is_compiling", _compiling)
    if "torch._dynamo.callback" not in sys.modules:
        _wrap(module, "_compile", page.COMPILE)


def compilations(module: Any) -> None:
    """The graphs of torch.compile, those that are compiled while they run included. Its callbacks would be cleared."""
    handler = module.CompilationCallbackHandler
    start, end = handler.run_start_callbacks, handler.run_end_callbacks
    if hasattr(start, "_dlrover_hang"):
        return
    depth = 0

    @functools.wraps(start)
    def run_start_callbacks(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        global _compiled
        _compiled, depth = True, worker.enter(page.COMPILE)
        return start(*args, **kwargs)

    @functools.wraps(end)
    def run_end_callbacks(*args: Any, **kwargs: Any) -> Any:
        if depth:
            worker.leave(depth)
        return end(*args, **kwargs)

    run_start_callbacks._dlrover_hang = True  # type: ignore[attr-defined]
    handler.run_start_callbacks, handler.run_end_callbacks = run_start_callbacks, run_end_callbacks
