"""Writes down what a worker has imported by its first optimizer step, so that others need not import it again.

Where no optimizer of PyTorch steps, the list is written by the first collection of garbage a minute after the start,
which needs no thread and no signal, or at the exit. After that nothing of this is left in the process."""

import atexit
import gc
import os
import sys
import time

_LATEST = 60  # seconds after the start
_OPTIMIZER = "torch.optim.optimizer"
_learner = None


class _Learner:
    def __init__(self, path, known):
        self.path, self.known, self.pid, self.start = path, known, os.getpid(), time.monotonic()
        self.cwd, self.env = os.getcwd(), dict(os.environ)
        gc.callbacks.append(self._collected)
        atexit.register(self.learn, "exit")
        if _OPTIMIZER in sys.modules:
            self.watch(sys.modules[_OPTIMIZER])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        """Finds what the finders after it find, to hear when the optimizers have been imported."""
        if name != _OPTIMIZER or self not in sys.meta_path:
            return None
        rest = sys.meta_path[sys.meta_path.index(self) + 1:]
        sys.meta_path.remove(self)
        for finder in rest:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                self._hear(spec.loader)
                return spec
        return None

    def _hear(self, loader):
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module):
            vars(loader).pop("exec_module", None)
            execute(module)
            self.watch(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            pass  # a loader of a strange kind

    def watch(self, module):
        """All optimizers call a method for profilers after a step. It is replaced until it has been called."""
        optimizer = getattr(module, "Optimizer", None)
        own = getattr(optimizer, "__dict__", {}).get("_optimizer_step_code")
        if own is None:
            return

        def _optimizer_step_code(self_):
            if vars(optimizer).get("_optimizer_step_code") is _optimizer_step_code:
                optimizer._optimizer_step_code = own
            self.learn("step")
            return own(self_)

        _optimizer_step_code._torchdynamo_disable = True
        optimizer._optimizer_step_code = _optimizer_step_code

    def _collected(self, phase, info):
        if time.monotonic() - self.start > _LATEST:
            self.learn("time")

    def learn(self, why):
        """Writes the list, once, and leaves. why: what it is that has happened."""
        global _learner
        mine, _learner = _learner is self, None
        if not mine:
            return
        try:
            if self._collected in gc.callbacks:
                gc.callbacks.remove(self._collected)
            atexit.unregister(self.learn)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            if os.getpid() == self.pid:
                self._write({"v": 1, "pid": self.pid, "why": why, "seconds": round(time.monotonic() - self.start, 3),
                             "modules": self._modules(), "env": self._changes()})
        except Exception:
            pass  # the list is not there

    def _modules(self):
        """The names of modules that are none of the job's own, in the order of their imports, without those that were
        known at the start."""
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        own = [os.path.join(os.path.realpath(d), "") for d in (self.cwd, main and os.path.dirname(main)) if d]
        library = os.path.join(os.path.dirname(os.path.realpath(os.__file__)), "")
        here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        names, known = [], {}
        for name, module in list(sys.modules.items()):
            if name in self.known:
                continue
            path, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
            if not isinstance(path, str) or getattr(spec, "name", None) != name or name.startswith("_dlrover_"):
                continue
            if name == "__main__" or name == "sitecustomize" or path.startswith(here):
                continue
            dir = os.path.dirname(path)
            if dir not in known:
                real = os.path.join(os.path.realpath(dir), "")
                packaged = real.startswith(library) or "/site-packages/" in real or "/dist-packages/" in real
                known[dir] = packaged or not real.startswith(tuple(own))
            if known[dir]:
                names.append(name)
        return names

    def _changes(self):
        """The variables that are others than at the start, None: those that are gone. The script may have set them for
        imports to read."""
        now = dict(os.environ)
        return {n: now.get(n) for n in sorted(set(now) | set(self.env)) if now.get(n) != self.env.get(n)}

    def _write(self, what):
        import json

        new = "%s.%d.new" % (self.path, self.pid)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w") as f:
                json.dump(what, f)
            os.replace(new, self.path)
        except BaseException:
            os.unlink(new)
            raise


def start(path, known=()):
    """path: the file to write. known: modules that are of no interest."""
    global _learner
    if _learner is None:
        _learner = _Learner(path, known)
