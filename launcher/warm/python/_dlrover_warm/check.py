"""Imports, and whether what they leave behind can be forked."""

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
_STARVED = 6  # times the deadline that a trial may take if it gets no CPU
_DONE = b"done"  # what a trial says when it has succeeded: the end of its process takes milliseconds
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
        gc.freeze()  # a collection of all that has been imported takes a while, and finds 1 % of it
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


def trial(prepare):
    """Lets a fork do what would hang or die in forks of a process that is not fit for it."""
    def in_fork():
        prepare()
        compute()

    return Trial(in_fork if {"torch", "numpy"} & set(sys.modules) else None)


class Trial:
    """A fork of this process that does some work; None: there is nothing to try."""

    def __init__(self, work):
        self._pid = None
        self._out, into = os.pipe()
        os.set_blocking(self._out, False)
        if work is not None:
            self._pid = os.fork()
            if self._pid == 0:
                _try(work, into)
        os.close(into)

    def fails(self, deadline, called_off=()):
        """Why the work cannot be done; "": it has been; CALLED_OFF: one of the files called_off can be read before that.
        deadline, in seconds, is for a machine that has time."""
        if self._pid is None:
            return ""
        start = moved = time.monotonic()
        used, said = -1, None
        while True:
            ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            now = time.monotonic()
            if ended:
                return self._meaning(ended, said)
            elif _cpu(self._pid) != used:
                used, moved = _cpu(self._pid), now
            elif now - start > _STARVED * deadline or (
                    now - start > deadline and now - moved > deadline / 4 and not _wants_cpu(self._pid)):
                return "is stuck"
            ready = select.select([*called_off] + [self._out] * (said is None), [], [], 0.005)[0]
            if self._out in ready:
                said = self._heard()
            elif ready:
                return CALLED_OFF
            if said == _DONE:
                return ""

    def _meaning(self, ended, said):
        """What is wrong with a trial that has ended; "": nothing."""
        if ended.si_code != os.CLD_EXITED:
            return "failed: ended by signal %d" % ended.si_status
        if ended.si_status == 0:
            return ""
        return "failed: " + ((said or self._heard()).decode(errors="replace") or "ended with code %d" % ended.si_status)

    def _heard(self):
        try:
            return os.read(self._out, 1000)
        except BlockingIOError:
            return b""

    def forget(self):
        """For other forks of this process: the trial is not theirs."""
        self._pid = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        os.close(self._out)
        if self._pid is None:
            return
        for kill in os.kill, os.killpg:  # with what it has started
            try:
                kill(self._pid, signal.SIGKILL)
            except OSError:
                pass  # it has not made a group yet
        os.waitpid(self._pid, 0)


def _try(work, into):
    try:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        null = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):
            os.dup2(null, fd)
        work()
        os.write(into, _DONE)
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
