"""What a worker finds at its start, and what it computes: the same whether it was started or forked.

FACTS/RANK.N.json is of the Nth start of a rank: facts that have to be the same ("same"), what must be of each process
alone ("own"), and losses, to the bit. One rank is killed in its first start, after the second step, when FACTS/go is there."""

import gc
import json
import locale
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
import uuid
import warnings

DIR = os.environ["FACTS"]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS, KILLED = 5, 1
# Of one job, one start, or for our own processes.
OTHERS = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "PYTHONPATH", "E2E_TAG")
found = {"same": {}, "own": {}, "losses": []}


def _ours(path):
    return any(os.path.exists(os.path.join(path, m)) for m in ("_dlrover_warm", "_dlrover_hang"))


def _of_us(thing):
    return str(getattr(thing, "__module__", "")).startswith("_dlrover_")


def _path(path):
    return [p for p in path if not _ours(p)]


def _streams():
    for s in sys.stdin, sys.stdout, sys.stderr:
        yield [s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty(), type(s.buffer).__name__]


def _descriptors():
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            name = os.readlink("/proc/self/fd/%d" % fd)
        except OSError:
            continue
        if fd > 2 and "libffi" not in name and ".page" not in name:
            yield [fd, name.partition(":[")[0]]


def _status():
    for line in open("/proc/self/status"):
        if line.startswith(("SigB", "SigI", "SigC", "SigP", "ShdPnd", "Threads", "Umask", "NoNewPrivs", "Cpus_allowed_l")):
            yield line.split()


def _main():
    m = sys.modules["__main__"]
    spec = getattr(m, "__spec__", None)
    return [m.__name__, getattr(m, "__file__", None), m.__package__, spec and spec.name, type(m.__loader__).__name__,
            sorted(vars(m))]


def _env():
    return ((n, v) for n, v in os.environ.items() if n not in OTHERS and not n.startswith("DLROVER_"))


def begin(pools=True):
    """Called at the top of a script. pools: numerical libraries have no threads after the imports, either."""
    found["same"] = {
        "argv": sys.argv, "orig_argv": getattr(sys, "orig_argv", None), "path": _path(sys.path), "main": _main(),
        "executable": [sys.executable, sys.prefix, sys.base_prefix], "flags": str(sys.flags),
        "xoptions": sys._xoptions, "warnoptions": sys.warnoptions,
        "env": dict(_env()),
        "pythonpath": _path(os.environ.get("PYTHONPATH", "").split(os.pathsep)),
        "real env": sorted(e.partition("=")[0] for e in open("/proc/self/environ").read().split("\0")
                           if not e.startswith("DLROVER_")),
        "cmdline": open("/proc/self/cmdline").read().split("\0"), "comm": open("/proc/self/comm").read(),
        "signals": {n: str(signal.getsignal(n)) for n in range(1, 32)}, "status": list(_status()),
        "threads": [len(os.listdir("/proc/self/task"))] + [t.name for t in threading.enumerate()],
        "streams": list(_streams()), "descriptors": list(_descriptors()), "cwd": os.getcwd(),
        "session": os.getsid(0) == os.getpid() == os.getpgid(0), "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduler": os.sched_getscheduler(0), "affinity": sorted(os.sched_getaffinity(0)),
        "limits": [resource.getrlimit(n) for n in range(16)], "locale": [locale.getlocale(), time.tzname],
        "gc": [gc.isenabled(), gc.get_threshold()], "hooks": [str(h) for h in (sys.excepthook, sys.displayhook, sys.gettrace(), sys.getprofile())],
        "recursion": sys.getrecursionlimit(),
    }
    if not pools:
        found["same"]["status"] = [s for s in found["same"]["status"] if s[0] not in ("Threads:", "SigCgt:")]
        del found["same"]["threads"][0]
    if "PYTHONHASHSEED" in os.environ:
        found["same"]["hash"] = [hash("a"), list({"a", "b", "c", "d"})]
    found["own"] = {"pid": os.getpid(), "random": random.random(), "uuid": str(uuid.uuid4())}
    say("begun")


def late():
    """Called after the imports."""
    import torch

    if "of torch" in found["same"]:
        return
    found["own"]["torch"] = torch.initial_seed()
    found["same"]["after the imports"] = {
        "env": dict(_env()), "signals": {n: str(signal.getsignal(n)) for n in range(1, 32)}, "status": list(_status()),
        "threads": [t.name for t in threading.enumerate()], "descriptors": list(_descriptors()),
        "meta_path": [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path if not _of_us(type(f))],
        "gc": [gc.isenabled(), gc.get_threshold(), [str(c) for c in gc.callbacks if not _of_us(c)]],
        "logging": [str(logging.root.handlers), logging.root.level], "hooks": str(sys.excepthook),
        # PyTorch's compiler imports SymPy, in warm workers before the first step.
        "warnings": [str(f) for f in warnings.filters if "sympy" not in str(f)], "path": _path(sys.path), "cwd": os.getcwd(),
    }
    found["same"]["of torch"] = [torch.get_num_threads(), torch.get_num_interop_threads(), torch.cuda.is_available(),
                              torch.cuda.device_count(), str(torch.get_default_dtype())]


def same(name, value):
    found["same"][name] = value


def say(*words):
    print("rank", RANK, *words)
    print("rank", RANK, *words, file=sys.stderr)


def loss(value, die=True):
    """Notes a loss. The first time the rank is killed after the second one."""
    found["losses"].append(float(value).hex())
    say("step", len(found["losses"]), float(value).hex())
    _write()
    if die and RANK == KILLED and len(found["losses"]) == 2 and _number() == 1:
        while not os.path.exists(DIR + "/go"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


_mine = None


def _number():
    global _mine
    if _mine is None:
        n = 1
        while os.path.exists("%s/%d.%d.json" % (DIR, RANK, n)):
            n += 1
        _mine = n
    return _mine


def _write():
    path = "%s/%d.%d.json" % (DIR, RANK, _number())
    with open(path + ".new", "w") as f:
        json.dump(found, f)
    os.replace(path + ".new", path)


def batch(step):
    import torch

    return torch.randn(8 * WORLD, 4, generator=torch.Generator().manual_seed(step))[RANK::WORLD]


def ddp(batches=None):
    """Trains with DistributedDataParallel."""
    import torch
    import torch.distributed as dist

    late()
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x = batch(step) if batches is None else batches[step]
        out = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        out.backward()
        optimizer.step()
        loss(out.item())
    dist.barrier()
    dist.destroy_process_group()


def end():
    """Called at the end of a script."""
    say("ended")
    _write()
