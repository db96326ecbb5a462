"""A distributed optimizer: rank 0 of the data parallel group writes the state of all of it."""

import torch


class MegatronOptimizer:
    is_stub_optimizer = False

    def __init__(self, param_state, writer):
        self.step_count = 0
        self.param_state = param_state
        self._writer = writer

    def state_dict(self):
        return {"step_count": self.step_count}

    def load_state_dict(self, state_dict):
        self.step_count = state_dict["step_count"]


class DistributedOptimizer(MegatronOptimizer):
    def save_parameter_state(self, filename):
        if self._writer:
            torch.save({"param": self.param_state}, filename)

    def load_parameter_state(self, filename, *, update_legacy_format=False):
        if self._writer:
            self.param_state.copy_(torch.load(filename)["param"])
