"""Steps that take as many batches as if all ranks of the largest world were there."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any, Dict, Iterator, Optional

import torch
import torch.distributed as dist

from dlrover.trainer.torch.elastic._gradients import GradientState
from dlrover.trainer.torch.flash_checkpoint._lacking import lacking

_log = logging.getLogger(__name__)


class _ElasticOptimizer(torch.optim.Optimizer):
    """Steps, and sets gradients to zero, only where all batches of a step are in them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:  # not torch's: the state is the other one's
        self.optimizer = optimizer
        self.gradient_state = GradientState()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" or name.startswith("__"):  # copies ask before there is one
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: Any) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: Any) -> None:
        self.optimizer.add_param_group(param_group)

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self.gradient_state.may_zero():
            self.optimizer.zero_grad(*args, **kwargs)

    def step(self, closure: Any = None) -> Any:
        state, loss = self.gradient_state, None
        state.asked = True
        if state.sync_gradients:
            loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
            state.apply()
        return loss

    def __getstate__(self) -> Dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.__dict__.update(state)


class _ElasticLRScheduler:
    """Does not step for a batch that is not the last one of its step."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.gradient_state = GradientState()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self.gradient_state.sync_gradients or not self.gradient_state.inside:
            self.scheduler.step(*args, **kwargs)


class ElasticTrainer:
    """Keeps the number of batches that a step of the optimizer takes, by accumulation, when the world is smaller.

        trainer = ElasticTrainer(model, dataloader=loader)
        optimizer, scheduler = trainer.prepare(optimizer, scheduler)
        for x, y in loader:
            with trainer.step(fix_total_batch_size=True):
                loss = criterion(model(x), y) / trainer.gradient_accumulation_steps
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    As in DLRover, the gradients of the batches of a step are added up. Unlike there, all ranks take the same number of
    batches: otherwise some of them come to the end of the epoch earlier, and the others wait for them.
    """

    def __init__(self, model: Any, dataloader: Any = None) -> None:
        self.model = model
        self.dataloader = dataloader
        self.gradient_state = GradientState()
        self.gradient_accumulation_steps = 1

    def prepare(self, optimizer: Any, lr_scheduler: Any = None) -> Any:
        """Wraps the optimizer, and the scheduler if there is one. The process group must be there already."""
        ranks, most = _ranks()
        steps = _accumulation(most, ranks)
        self.gradient_accumulation_steps = self.gradient_state.accumulation_steps = steps
        if steps * ranks != most:
            _log.warning("a step of %d ranks with a fixed batch size takes %d batches, not the %d of the largest world",
                         ranks, steps * ranks, most)
        optimizer = _ElasticOptimizer(optimizer)
        return (optimizer, _ElasticLRScheduler(lr_scheduler)) if lr_scheduler else optimizer

    @contextlib.contextmanager
    def step(self, fix_total_batch_size: bool = False) -> Iterator[None]:
        """Around the training on one batch. With fix_total_batch_size the optimizer steps at the last one of
        gradient_accumulation_steps batches only, and the ranks exchange gradients only there."""
        state = self.gradient_state
        state.begin(fix_total_batch_size)
        with contextlib.ExitStack() as stack:
            if not state.sync_gradients and hasattr(self.model, "no_sync"):
                stack.enter_context(self.model.no_sync())
            try:
                yield
            finally:
                state.inside = False
        if state.sync_gradients:
            state.apply()  # by another optimizer, or by none, as its gradients were not finite

    def reset(self) -> None:
        """Resets the count of steps, as scripts do at each epoch."""
        self.gradient_state.num_steps = 0

    @property
    def num_steps(self) -> int:
        """Steps of the optimizer; within a context, that of this batch counts as soon as it is done."""
        return self.gradient_state.num_steps


def _ranks() -> "tuple[int, int]":
    """The number of ranks, now and in the largest world; the same on all ranks, regardless of their nodes' settings."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    most = _number("WORKER_NUM") or _number("DLROVER_MAX_NODES")  # DLRover's pods have the first, our workers the other
    nodes = _number("GROUP_WORLD_SIZE") or -(-ranks // (_number("LOCAL_WORLD_SIZE") or 1))
    return ranks, max(most * ranks // nodes, ranks)


def _number(variable: str) -> int:
    text = os.environ.get(variable, "").strip()
    if text and not text.isdigit():
        raise ValueError("%s=%s: need a whole number of nodes or ranks" % (variable, text))
    return int(text or 0)


def _accumulation(most: int, ranks: int) -> int:
    """How many batches each rank takes, so that all together come closest to most; the more of two."""
    below = max(most // ranks, 1)
    return below + 1 if (below + 1) * ranks - most <= most - below * ranks else below


__getattr__ = lacking(__name__, {
    "TrainingRecord": "nothing reads it; dlroverctl status tells how far a job is",
    "find_free_port": "use --ports=N of dlrover-run, or bind port 0",
    "get_rank": "use torch.distributed.get_rank()",
})
