"""What a fork has to make good, so that it is like a process that has just been started."""

import contextlib
import ctypes
import os
import sys
import time

_pools = []  # pairs of functions of OpenBLAS that tell and set how many threads it uses


def find_pools():
    """Called where all is imported, before the fork: to look for libraries takes its time."""
    names = ["%sopenblas_%%s_num_threads%s" % (a, z) for a in ("", "scipy_") for z in ("", "64_")]
    with open("/proc/self/maps") as f:
        paths = {line.split(None, 5)[5].strip() for line in f if "openblas" in line and ".so" in line}
    del _pools[:]
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            continue
        for name in names:
            if hasattr(library, name % "set") and hasattr(library, name % "get"):
                _pools.append((getattr(library, name % "get"), getattr(library, name % "set")))
                break


def threads(before):
    """Gives numerical libraries the threads that the environment and the CPU set ask for. before: the variables and
    the number of CPUs when they were imported, and those that the script sets for that."""
    cpus = len(os.sched_getaffinity(0))
    env = dict(os.environ, **before["set"])
    for get, set in _pools:
        want = min(_number(env, "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS") or cpus, cpus)
        if get() != want:
            set(want)
    torch = sys.modules.get("torch")
    was, now = before.get("OMP_NUM_THREADS"), os.environ.get("OMP_NUM_THREADS")
    if torch is not None and (was != now or not now and before["cpus"] != cpus):
        torch.set_num_threads(_number(env, "OMP_NUM_THREADS") or cpus)


def _number(env, *names):
    """The first of these variables that is a number of threads, or 0."""
    for name in names:
        value = (env.get(name) or "").split(",")[0].strip()
        if value.isdigit() and int(value) > 0:
            return int(value)
    return 0


def seeds():
    """Every fork draws its own numbers."""
    modules = sys.modules
    if "random" in modules:
        modules["random"].seed()
    if "numpy.random" in modules:
        modules["numpy.random"].seed()
    generator = getattr(modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.seed()
    process = modules.get("multiprocessing.process")
    if process is not None:
        config = process.current_process()._config
        if "authkey" in config:
            config["authkey"] = process.AuthenticationString(os.urandom(32))


def modules_that_know_the_process():
    """Those that have remembered what they are in."""
    time.tzset()
    threading = sys.modules.get("threading")
    main = getattr(threading, "main_thread", lambda: None)()
    if hasattr(main, "_set_native_id"):
        main._set_native_id()
    hang = sys.modules.get("_dlrover_hang")
    if hasattr(hang, "begin"):
        hang.begin()


class Environment:
    """The variables of a process before its imports, and what imports have done to them."""

    def __init__(self):
        self.start = dict(os.environb)
        self.changed = {}
        self.pretended = {}
        self.written = set()  # names that imports have set
        self.read = set()  # names that they have read, as texts

    def pretend(self, variables):
        """Sets variables for the time of the imports; None: unsets them."""
        more = {os.fsencode(k): v if v is None else os.fsencode(v) for k, v in variables.items()}
        self.pretended.update(more)
        _apply(more)
        self.written.difference_update(more)

    @contextlib.contextmanager
    def observed(self):
        """Notes which variables imports read, and which they set, even to what they are."""
        kind = type(os.environ)
        get, set, default = kind.__getitem__, kind.__setitem__, kind.setdefault

        def __getitem__(environ, name):
            self.read.add(name)
            return get(environ, name)

        def __setitem__(environ, name, value):
            set(environ, name, value)
            self.written.add(os.fsencode(name))

        def setdefault(environ, name, value):
            key = os.fsencode(name)
            if key in self.pretended and key not in self.start and key not in self.written:
                environ[name] = value  # it would not be there
            return default(environ, name, value)

        kind.__getitem__, kind.__setitem__, kind.setdefault = __getitem__, __setitem__, setdefault
        try:
            yield
        finally:
            kind.__getitem__, kind.__setitem__, kind.setdefault = get, set, default

    def take_reads(self):
        """The names that imports have read since the last call."""
        taken, self.read = self.read, set()
        return taken

    def imported(self):
        """Ends what is pretended, and remembers what imports have changed."""
        now = dict(os.environb)
        _apply({k: self.start.get(k) for k, v in self.pretended.items() if now.get(k) == v and k not in self.written})
        self.pretended = {}
        now = dict(os.environb)
        self.changed = {k: now.get(k) for k in set(now) | set(self.start) if now.get(k) != self.start.get(k)}

    def become(self, entries):
        """Sets the variables of a process that has imported the same. entries: its own, as NAME=VALUE."""
        env = {}
        for entry in entries:
            name, equals, value = entry.partition(b"=")
            if equals and name:
                env.setdefault(name, value)
        for name, value in self.changed.items():
            if env.get(name) == self.start.get(name):  # what it was when the imports changed it
                env[name] = value
        now = dict(os.environb)
        _apply({k: None for k in now if k not in env})
        _apply({k: v for k, v in env.items() if now.get(k) != v})


def _apply(variables):
    for name, value in variables.items():
        if value is None:
            os.environb.pop(name, None)
        else:
            os.environb[name] = value
