"""The process that imports, and forks workers. It runs in place of a script, without a Python frame below it."""

import atexit
import contextlib
import gc
import os
import signal
import sys
import time
import traceback

from . import check, child, command, pace, pages, repair, script, wire

# Variables of one rank or epoch, which launchers or scripts set: a module that reads one when it is imported is not for
# others. The others that the first attempt's script had set are set for the imports, for it may have set them so that
# they are read then.
_OF_A_RANK = frozenset(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                        "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                        "TORCHELASTIC_RESTART_COUNT", "CUDA_VISIBLE_DEVICES", "DLROVER_WARM"))

# Read by whatever looks for a program, to remember nothing of it.
_SEARCHED = frozenset(("PATH",))

# Variables that PyTorch's compiler sets when it is imported, to what it would find without them.
_OF_THE_COMPILER = (b"TORCHINDUCTOR_CACHE_DIR",)

# Seconds.
_AT_ONCE = 0.002
_QUIET = 0.5  # without messages, until workers that have waited for their forks have started
_REHEARSAL = 1  # seconds that it may take a machine that has time to find the pages that forks write


def run():
    """Serves the launcher, which is at the other end of descriptor 0, until it is gone. It returns in a fork only,
    that is to become a worker: what the interpreter takes for an importer of its script."""
    try:
        return Parent().serve()
    except BaseException:
        traceback.print_exc()
        os._exit(3)


class Parent:
    def __init__(self):
        self.wire = _take_control()
        self.following = None  # a message that has been received before its time, with its descriptors
        self.command = command.Command(command.of_this_process())
        self.environment = repair.Environment()
        self.cwd = os.getcwd()
        self.before = dict(os.environ, cpus=len(os.sched_getaffinity(0)), set={})
        self.launcher = os.getppid()
        self.pid = os.getpid()
        self.untold = False  # the files of the modules are still to be told
        self.known = frozenset()  # the modules that have been imported for workers
        self.pages = None  # that a fork comes to write, when that is known
        self.told = {}  # variables as workers have told that the script sets them
        self.unknown = set()  # names of variables that it sets to what is not known
        atexit.register(gc.unfreeze)  # the last that a fork does: modules are freed as if nothing had been frozen
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # that is for the job

    def serve(self):
        while True:
            if self.untold and not self.following and not self.wire.readable(_QUIET):
                self._tell_files()
            message, fds = self.following or self.wire.receive()
            self.following = fork = None
            if message is None or message.get("op") == "quit":
                os._exit(0)
            elif message["op"] == "prepare":
                fork = self._prepare(dict(message, **wire.load(fds[0])) if fds else message)
            elif message["op"] == "fork":
                fork = self._fork(self._asked(message, fds), message.get("urgent"))
            elif message["op"] == "run":
                return child.Child(self, self.wire).run(message, fds)
            if fork is not None:
                return fork.serve()

    def _prepare(self, message):
        """Imports, and says whether forks can be made. Those that are asked for during the trial are made at once: in one
        of them it returns its Child."""
        start = time.monotonic()
        self.pages = None
        self.launcher = message.get("launcher", self.launcher)
        urgent = message.get("urgent")
        with contextlib.ExitStack() as end:
            if not urgent:
                end.enter_context(pace.gentle())
            try:
                failed = self._import(message)
                self.known = frozenset(sys.modules)
                trial = end.enter_context(self._trial())
                if urgent:
                    self.wire.send({"op": "imported"})
                fork = self._await(trial, message.get("deadline", 20), urgent)
                if fork is not None:
                    trial.forget()
                    return fork
                answer = {"op": "prepared", "v": wire.VERSION, "pid": self.pid, "modules": len(sys.modules),
                          "failed": failed[:100], "threads": len(os.listdir("/proc/self/task"))}
                self.untold = True
            except check.Unsafe as e:
                answer = {"op": "unsafe", "v": wire.VERSION, "why": str(e), "module": e.module, "first": e.first}
            self._send(dict(answer, seconds=round(time.monotonic() - start, 3)), names=list(sys.modules))
            if not urgent:
                self._tell_files()

    def _send(self, message, **more):
        """more is for a file, as it would be too long for a packet."""
        body = wire.store(more)
        self.wire.send(message, body)
        os.close(body)

    def _tell_files(self):
        if self.untold:
            self._send({"op": "files"}, files=check.files())
        self.untold = False

    def _await(self, trial, deadline, urgent):
        """Raises Unsafe if the trial fails. In a fork that was asked for meanwhile it returns its Child."""
        while True:
            why = trial.fails(deadline, [self.wire] if urgent and not self.following else [])
            if why != check.CALLED_OFF:
                break
            message, fds = self.wire.receive()
            if message is None or message.get("op") != "fork":
                self.following = message, fds
                continue
            fork = self._fork(self._asked(message, fds), urgent)
            if fork is not None:
                return fork
        if why:
            raise check.Unsafe("a fork that multiplies matrices, goes backward and loads a batch " + why)
        return None

    def _import(self, message):
        """Pairs of the modules that cannot be imported, and why not."""
        python = message.get("python", self.command.python)
        if python != self.command.python:  # pyenv's is a script, and sets variables that a fork would not have
            raise check.Unsafe("%s starts another interpreter; set PYTHON_EXEC=%s" % (python, self.command.python))
        self.standby = message.get("standby", False)
        variables = {}
        if not self.standby:
            variables["OPENBLAS_NUM_THREADS"] = "1"  # a fork has none of its threads; see repair.threads
            if "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ:
                variables["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # imports that look for a GPU must not initialize it
        self.environment.pretend(variables)
        failed = []
        self.told = message.get("env") or {}
        for steps in self._steps(message):
            early = dict(os.environb)
            with self.environment.observed():
                failed += check.import_all(steps, message.get("deny") or [], self._change, self._after)
        for name in _OF_THE_COMPILER:  # by an import that a fresh worker makes at its first step
            if name not in early:
                os.environb.pop(name, None)
        for name in set(script.LATER.values()).difference(message.get("modules") or []):  # older PyTorch has none
            failed = [f for f in failed if f != [name, "ModuleNotFoundError: No module named %r" % name]]
        self.environment.imported()
        repair.find_pools()
        return failed

    def _trial(self):
        if self.standby:
            return check.Trial(None)
        check.safe_to_fork()
        return check.trial(lambda: repair.threads(self.before))

    def _steps(self, message):
        """The steps of script.py: the script's own, and then, apart, those modules that workers have imported later, with
        the variables that their script has set by then. only: of the script's modules those that are named."""
        names = message.get("modules") or []
        rest = [(n, script.becomes(v)) for n, v in (message.get("env") or {}).items() if n not in _OF_A_RANK]
        rest += [(n, None) for n in names]
        if not message.get("script"):
            return [rest]
        steps, later_ones = script.steps(message["script"], message.get("module", False))
        if message.get("only"):
            wanted = {n.partition(".")[0] for n in names}
            steps = [(n, c) for n, c in steps if c or n.partition(".")[0] in wanted]
        read, later = (tuple(message.get(k) or ()) for k in ("at_import", "later"))
        why = script.needs_execution(steps, lambda n: (n + "=").startswith(read) and not (n + "=").startswith(later),
                                     os.environ)
        if why and not message.get("learned"):
            raise check.Unsafe(why, first=True)
        return [s for s in rest if why and s[1]] + steps, later_ones + rest

    def _change(self, name, change):
        """Does a step that changes a variable."""
        value = change(os.environ.get(name))
        self.environment.take_reads()
        if value is script.UNKNOWN or name == script.ANY:
            self.unknown.update({name}.difference(self.told))
            return
        self.unknown.discard(name)
        self.before["set"][name] = value
        if name != "OPENBLAS_NUM_THREADS" or self.standby:
            self.environment.pretend({name: value})

    def _after(self, name):
        """Raises Unsafe if the import of a module has done what has to be done in each worker. A module that reads what
        is of a worker is left to the workers with its package, for others of that import it, too."""
        if not self.standby:
            check.unchanged(name)
        read, known = self.environment.take_reads(), script.reads_few_variables(name)
        package = name if known else name.partition(".")[0]
        for variable in sorted(read & _OF_A_RANK):
            if os.fsencode(variable) not in self.environment.start:
                raise check.Unsafe("importing %s reads $%s, of which each worker has its own" % (name, variable),
                                   package)
        for variable in sorted(() if known else read & self.unknown - _SEARCHED):
            raise check.Unsafe("importing %s reads $%s, which the script has set, and only running it tells how" %
                               (name, variable), package)

    def _asked(self, message, fds):
        """The descriptors of each fork that is asked for. Workers that start want all of theirs at once."""
        forks = [fds]
        while message.get("urgent") and self.wire.readable(_AT_ONCE):
            message, fds = self.wire.receive()
            if message is None or message.get("op") != "fork":
                self.following = message, fds
                break
            forks.append(fds)
        return forks

    def _fork(self, forks, urgent):
        """In a fork it returns its Child. The process between this one and the forks ends at once: the launcher adopts
        them, and is told how they end."""
        if self.pages is None and not urgent:
            self._tell_files()
            with pace.gentle():  # until the launcher says more: then workers start
                self.pages = pages.written(lambda: repair.threads(self.before), _REHEARSAL, self.wire)
        between = os.fork()
        if between == 0:
            try:
                for own in forks:
                    if os.fork() == 0:
                        break
                else:
                    os._exit(0)
                self.wire.close()
                for fds in forks:
                    wire.close([fd for fd in fds if fd != own[0]])
                return child.Child(self, wire.Wire(own[0]))
            except BaseException:
                traceback.print_exc()
                os._exit(3)
        for fds in forks:
            wire.close(fds)
        os.waitpid(between, 0)
        return None


def _take_control():
    """Makes descriptor 0 what it is for others."""
    import fcntl

    try:
        control = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 100)
    except OSError:  # ulimit -n is below that
        control = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return wire.Wire(control)
