"""How far this process is with its gradients. The trainer and the sampler share it."""

from __future__ import annotations

from typing import Any, Dict


class GradientState:
    """One state of a process, however many objects there are.

    A step of the optimizer takes the gradients of several batches, as many as gradient_accumulation_steps; each of
    them is trained on in a context of ElasticTrainer.step. sync_gradients is True for the last of them.
    """

    _shared_state: Dict[str, Any] = {}

    def __init__(self) -> None:
        self.__dict__ = self._shared_state
        if self.initialized:
            return
        self.sync_gradients = True
        self.num_backward_steps = 0
        self.num_steps = 0
        self.accumulation_steps = 1
        self.pending = 0  # batches that were begun and that no step of the optimizer has taken
        self.applied = True  # the step that the present batch completes is done
        self.asked = False  # the optimizer has stepped, or was about to, since this batch began
        self.inside = False  # of a context

    @property
    def initialized(self) -> bool:
        return bool(self._shared_state)

    def begin(self, fixed: bool) -> None:
        """Another batch. fixed: it is one of accumulation_steps."""
        self.num_backward_steps += 1
        self.pending += 1
        self.sync_gradients = not fixed or self.pending >= self.accumulation_steps
        self.applied = self.asked = False
        self.inside = True

    def apply(self) -> None:
        """The optimizer has stepped, or would have if its gradients had been finite. Several may do it together."""
        if not self.applied:
            self.applied = True
            self.num_steps += 1
            self.pending = 0

    def may_zero(self) -> bool:
        """Whether no gradient is lost by setting all to zero, before the first backward or after the step."""
        return self.applied or (self.pending <= 1 and not self.asked)
