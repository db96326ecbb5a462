"""Imports, and whether what they leave behind can be forked."""

import contextlib
import gc
import importlib
import os
import select
import signal
import sys
import time

from . import script

# What is open where an accelerator is in use. NVML, which only counts devices, opens other files of NVIDIA's.
_DEVICES = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/davinci", "/dev/dri", "/dev/xpu", "/dev/mlu", "/dev/neuron", "/dev/hl",
            "/dev/accel")
_ACCELERATORS = ("cuda", "xpu", "npu", "mlu", "musa")  # modules of torch
_STARVED = 6  # times the deadline that a probe may take if it gets no CPU
CALLED_OFF = "is not wanted any more"


class Unsafe(Exception):
    """Workers must not be forked from this process."""

    def __init__(self, why, module="", first=False):
        super().__init__(why)
        self.module = module  # whose import is to blame, if that is known
        self.first = first  # the first workers only


def import_all(steps, deny, change, imported):
    """Imports modules, those denied and what is below them excepted. Returns pairs of those that cannot be, and why.
    steps are those of script.py, and change does those that change a variable. imported is called with the name of
    each that was imported, or tried: what it raises ends all."""
    pid, failed = os.getpid(), []
    real_exit, os._exit = os._exit, _no_exit
    collects = gc.isenabled()
    gc.disable()
    try:
        for name, value in steps:
            if value is not None:
                change(name, value)
                continue
            if name in sys.modules or _denied(name, deny) or script.is_within(name):
                continue
            try:
                importlib.import_module(name)
            except BaseException as e:
                failed.append([name, "%s: %s" % (type(e).__name__, str(e)[:200])])
            if os.getpid() != pid:
                real_exit(3)  # a fork that the module has made
            imported(name)
    finally:
        os._exit = real_exit
        if collects:
            gc.enable()
    return failed


def _no_exit(status):
    raise RuntimeError("os._exit(%s) in an import" % status)


def _denied(name, deny):
    return any(name == d or name.startswith(d + ".") for d in deny)


def unchanged(name):
    """Raises Unsafe if the import of a module has started something that a fork would lack."""
    threads = _threads()
    if len(threads) > 1:
        raise Unsafe("importing %s started threads: %s" % (name, ", ".join(threads[1:])), name)
    if _has_children():
        raise Unsafe("importing %s started a process" % name, name)


def _threads():
    """The names of this process's threads, the main one first."""
    found = []
    for tid in sorted(map(int, os.listdir("/proc/self/task"))):
        try:
            with open("/proc/self/task/%d/comm" % tid) as f:
                found.append(f.read().strip())
        except OSError:
            pass  # it has just ended
    return found


def _has_children():
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    except ChildProcessError:
        return False


def safe_to_fork():
    """Raises Unsafe unless forks of this process can do what a process can that has imported the same itself."""
    if sys.version_info < (3, 9) and (sys.flags.dev_mode or os.environ.get("PYTHONMALLOC", "").endswith("debug")):
        raise Unsafe("forks of Python 3.8 die when they end, with the memory allocator's debug hooks")
    unchanged("something")
    for name, device in _accelerators():
        if getattr(device, "is_initialized", bool)():
            raise Unsafe("torch.%s is initialized" % name)
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink("/proc/self/fd/" + fd)
        except OSError:
            continue
        if path.startswith(_DEVICES):
            raise Unsafe("an import has opened the accelerator %s" % path)


def _accelerators():
    """The modules of torch that are there."""
    found = ((n, sys.modules.get("torch." + n) or getattr(sys.modules.get("torch"), n, None)) for n in _ACCELERATORS)
    return [(n, m) for n, m in found if m is not None]


@contextlib.contextmanager
def probe(prepare, deadline):
    """Lets a fork do what would hang or die in forks of a process that is not fit for it, while this process does
    something else. Raises Unsafe after that."""
    if not {"torch", "numpy"} & set(sys.modules):
        yield
        return

    def in_fork():
        prepare()
        compute()

    with Trial(in_fork) as trial:
        yield
        why = trial.fails(deadline)
    if why:
        raise Unsafe("a fork that multiplies matrices, goes backward and loads a batch " + why)


def _pause(seconds):
    return bool(select.select([], [], [], seconds)[0])


class Trial:
    """A fork of this process that does some work."""

    def __init__(self, work):
        self._out, into = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _be_probe(work, into)
        os.close(into)

    def fails(self, deadline, called_off=_pause):
        """Why the work cannot be done; "": it has been. deadline, in seconds, is for a machine that has time. called_off
        waits for some seconds, or until the result is not wanted any more: then it is CALLED_OFF."""
        pid, self._pid = self._pid, None
        try:
            return _judge(pid, deadline, self._out, called_off)
        finally:
            _kill_group(pid)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._pid is not None:
            _end(self._pid, "")
            _kill_group(self._pid)
        os.close(self._out)


def _kill_group(pid):
    """Ends what a trial has started, too."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass


def _be_probe(work, into):
    try:
        gc.freeze()
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        null = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):
            os.dup2(null, fd)
        work()
        os._exit(0)
    except BaseException as e:
        os.write(into, repr(e).encode()[:1000])
        os._exit(1)


def compute():
    """What a worker with PyTorch or NumPy does, in small."""
    for name, device in _accelerators():  # an import may have asked whether there is one
        assert not getattr(device, "_is_in_bad_fork", bool)(), "torch.%s cannot be used in a fork" % name
    if "numpy" in sys.modules:
        ones = sys.modules["numpy"].ones((256, 256))  # enough for several threads
        assert float((ones @ ones)[0, 0]) == 256
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        x = torch.ones(256, 256, requires_grad=True)
        (x @ x).sum().backward()
        assert float(x.grad[0, 0]) == 512
        from torch.utils.data import DataLoader

        # From Python 3.14 on it would start an interpreter that imports all anew, which says nothing of forks.
        batches = DataLoader([torch.ones(4)] * 4, batch_size=2, num_workers=1, multiprocessing_context="fork")
        assert sum(float(b.sum()) for b in batches) == 16


def _judge(pid, deadline, out, called_off):
    """Waits for a probe, and returns what is wrong with it; "": nothing."""
    start = moved = time.monotonic()
    used, status = -1, None
    while status is None:
        done, code = os.waitpid(pid, os.WNOHANG)
        now = time.monotonic()
        if done:
            status = code
        elif _cpu(pid) != used:
            used, moved = _cpu(pid), now
        elif now - start > _STARVED * deadline or (
                now - start > deadline and now - moved > deadline / 4 and not _wants_cpu(pid)):
            return _end(pid, "is stuck")
        elif called_off(0.005):
            return _end(pid, CALLED_OFF)
    if status == 0:
        return ""
    os.set_blocking(out, False)
    try:
        text = os.read(out, 1000).decode(errors="replace")
    except BlockingIOError:
        text = ""
    if os.WIFSIGNALED(status):
        return "failed: ended by signal %d" % os.WTERMSIG(status)
    return "failed: " + (text or "ended with code %d" % (status >> 8))


def _end(pid, why):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return why


def _cpu(pid):
    """The CPU time of a process, in clock ticks."""
    with open("/proc/%d/stat" % pid, "rb") as f:
        fields = f.read().rpartition(b")")[2].split()
    return int(fields[11]) + int(fields[12])


def _wants_cpu(pid):
    """Whether a thread of a process waits for a CPU."""
    try:
        for tid in os.listdir("/proc/%d/task" % pid):
            with open("/proc/%d/task/%s/stat" % (pid, tid), "rb") as f:
                if f.read().rpartition(b")")[2].split()[0] == b"R":
                    return True
    except OSError:
        pass
    return False


def files():
    """The path, the time of the last change in ns, and the size of each file that modules are from."""
    found = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path not in found:
            try:
                s = os.stat(path)
                found[path] = [path, s.st_mtime_ns, s.st_size]
            except OSError:
                pass
    return list(found.values())
