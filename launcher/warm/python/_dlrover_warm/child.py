"""A fork that waits, and becomes a worker when the launcher says what it is to run."""

import ctypes
import os
import signal
import time

from . import command, install, learn, pages, proctitle, repair, start, stdio, wire

_PR_SET_PDEATHSIG = 1
_ADOPTION = 10  # seconds until the launcher has adopted a fork, at the most


class Child:
    def __init__(self, parent, connection):
        self.parent = parent
        self.wire = connection

    def serve(self):
        """Waits for the launcher's word, and returns as run() does."""
        _be_adopted(self.parent.launcher)
        repair.seeds()
        self._rehearse()
        self.wire.send({"op": "parked", "v": wire.VERSION, "pid": os.getpid()})
        message, fds = self.wire.receive()
        if message is None or message.get("op") != "run":
            os._exit(0)
        return self.run(message, fds)

    def _rehearse(self):
        """Does what becoming a worker takes, to have the copies of the parent's memory that it needs before the
        launcher waits for it."""
        stdio.renew()
        words = list(map(os.fsencode, self.parent.command.argv))
        proctitle.show(words, [k + b"=" + v for k, v in self.parent.environment.start.items()])
        os.environb[b"DLROVER_WARM"] = os.environb.get(b"DLROVER_WARM", b"")
        time.tzset()
        pages.copy(self.parent.pages or ())

    def run(self, message, fds):
        """Becomes a worker, and returns what the interpreter takes for an importer."""
        try:
            self._become(wire.load(fds[0]), fds[1:4])
            self.wire.send({"op": "running"})
            self.wire.close()
        except BaseException as e:
            self._refuse(e)
        return self

    def _refuse(self, error):
        try:
            self.wire.send({"op": "refused", "why": "%s: %s" % (type(error).__name__, error)})
        except BaseException:
            pass
        finally:
            os._exit(0)

    def _become(self, job, streams):
        wanted = command.Command(job["argv"])
        unlike = wanted.unlike(self.parent.command)
        if unlike:
            raise ValueError(unlike)
        env = [e.encode("utf-8", "surrogateescape") for e in job["env"]]
        if len(streams) != 3:
            raise ValueError("%d standard streams" % len(streams))
        if os.getsid(0) != os.getpid():
            os.setsid()
        for fd, stream in enumerate(streams):
            os.dup2(stream, fd)
        wire.close(streams)
        if job.get("cwd"):
            os.chdir(job["cwd"])
        if job.get("umask") is not None:
            os.umask(job["umask"])
        if job.get("cpus"):
            os.sched_setaffinity(0, job["cpus"])
        if job.get("memory"):
            _memory_policy(**job["memory"])
        self.parent.environment.become(env)
        _same_path(self.parent.cwd)
        stdio.renew()
        start.arrange(wanted)
        repair.threads(self.parent.before)
        repair.modules_that_know_the_process()
        proctitle.show([os.fsencode(w) for w in job["argv"]], env)
        if os.environ.get("DLROVER_WARM"):
            install(self.parent.known)
        _unblock()


def _same_path(cwd):
    """Raises ValueError if the modules' path has a place that depends on the working directory, and that is
    another."""
    path = os.environ.get("PYTHONPATH", "")
    if path and not all(p.startswith("/") for p in path.split(os.pathsep)) and os.getcwd() != cwd:
        raise ValueError("PYTHONPATH has relative names, and the working directory is not that of the imports")


def _memory_policy(call, mode, nodes):
    """Of this process and its children, by set_mempolicy."""
    import ctypes  # as a rule it has been imported
    libc = ctypes.CDLL(None, use_errno=True)
    mask = (ctypes.c_uint64 * len(nodes))(*nodes)
    if libc.syscall(ctypes.c_long(call), ctypes.c_long(mode), mask, ctypes.c_ulong(64 * len(nodes) + 1)):
        raise OSError(ctypes.get_errno(), "set_mempolicy")


def _unblock():
    signal.sigtimedwait({signal.SIGINT}, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _be_adopted(launcher):
    """Waits until the launcher is the parent, and asks to die with it. Ends the process if that does not come true."""
    end = time.monotonic() + _ADOPTION
    while os.getppid() != launcher:
        if time.monotonic() > end:
            os._exit(3)
        time.sleep(0.0005)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(3)
