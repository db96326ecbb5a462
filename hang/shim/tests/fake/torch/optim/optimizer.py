import os

_hooks = []

if os.environ.get("FAKE_TORCH", "2.1") >= "2":

    def register_optimizer_step_post_hook(hook):
        _hooks.append(hook)


class Optimizer:
    def _optimizer_step_code(self):
        pass

    def zero_grad(self):
        pass

    def step(self):
        self._optimizer_step_code()
        for hook in _hooks:
            hook(self, (), {})
