"""A timeline on demand. PyTorch's own profiler records steps, from the end of one on, in the thread that makes them; or
it records some seconds of all threads, with the functions of Python, and a thread of ours waits for them.

Nothing of this is imported before somebody asks for a timeline by the word WANTED of the page. The request is a file
beside that, and so is what has become of it. While the profiler runs, functions of torch.autograd.profiler are
replaced: if the job begins to profile itself, its own profiler finds ours gone. Before a fork it ends as well: the
child would record on, for nobody.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from _thread import _local, allocate_lock, get_ident
from time import monotonic, sleep
from typing import Any, Callable, Dict, List, Optional

from . import process
from .page import BEGUN, STEPS, STOP, TIMED, WANTED

_GUARDED = ("_prepare_profiler", "_enable_profiler")  # what begins, in torch.autograd.profiler
_MOST = 100  # steps
_LONGEST = 9 * 60  # seconds, which is less than who wants it waits
_ROOM = 1 << 30  # bytes by which this process may grow while all its threads are recorded
_WRITING = 60  # seconds for which the end of the interpreter waits until a trace is written

_running: Optional["_Recording"] = None


def step(words: memoryview, path: str) -> None:
    """A step has ended while a timeline is wanted. path: the request's file. Raises what a signal handler of the job
    has raised, and nothing else but what ends the process."""
    global _running
    word = words[WANTED]
    if word & TIMED:
        return
    try:
        if _running is not None:
            _running.step()
        elif word & BEGUN or word == STOP:
            words[WANTED] = 0  # that was another process, or is over
        else:
            _running = _Recording(words, word, path)
            words[WANTED] = word | BEGUN
            _running.begin()
    except Exception as e:
        if _running is not None:
            _running.end(_why(e))
        if _foreign(e):
            raise
    except BaseException:
        forget()
        raise


def record(words: memoryview, word: int, path: str) -> None:
    """A thread of its own: what all threads do is recorded for some seconds."""
    global _running
    process.name_thread("dlrover-profile")
    mine = _Seconds(words, word, path)
    try:
        if _running is not None:
            raise Refused("another timeline is being recorded")
        _running = mine
        mine.begin()
    except Exception as e:
        mine.end(_why(e))


def end() -> None:
    """The interpreter ends: what was recorded counts."""
    recording = _running
    _cut("the process has ended")
    if isinstance(recording, _Seconds):
        recording.written.acquire(True, _WRITING)  # the end would find that thread in PyTorch


def _before_fork() -> None:
    _cut("the process has forked")


def _cut(why: str) -> None:
    """Ends what this thread records, or what all of them do."""
    try:
        if isinstance(_running, _Seconds):
            _running.halt(why)
        elif _running is not None and _running.thread == get_ident():
            _running.finish(why)
    except Exception:
        forget()


os.register_at_fork(before=_before_fork)


def forget() -> None:
    """What runs is another process's, or has failed."""
    global _running
    if _running is not None:
        _running.release()
        _running = None


_kept = _local()  # by each thread


class _Goes:
    """With the thread that keeps it: nobody else can stop what that records."""

    def __init__(self, recording: "_Recording") -> None:
        self._recording = recording

    def __del__(self) -> None:
        if self._recording is _running:
            _cut("the thread that was recorded has ended")


class _Recording:
    """From begin() to end()."""

    def __init__(self, words: memoryview, word: int, path: str) -> None:
        self.thread = get_ident()
        self._pid = os.getpid()
        self._words = words
        self._word = word
        self._request = path
        self._to = ""
        self._left = self._steps = 0
        self._until = monotonic() + _LONGEST
        self._profile: Any = None
        self._records = self._starts = False
        self._autograd: Any = None
        self._guarded: Dict[str, Any] = {}
        self._lost = ""  # why there can be none, as another thread than ours or another process has found out

    def begin(self) -> None:
        request = self._read()
        self._left = max(1, min(int(request["steps"]), _MOST))
        _kept.goes = _Goes(self)
        self._start()

    def _read(self) -> Dict[str, Any]:
        with open(self._request, encoding="utf-8") as f:
            request: Dict[str, Any] = json.load(f)
        self._to = str(request["path"])
        return request

    def _start(self, **options: Any) -> None:
        """options: of PyTorch's profiler."""
        profiler, autograd = (sys.modules.get(n) for n in ("torch.profiler.profiler", "torch.autograd.profiler"))
        if profiler is None or autograd is None:
            raise Refused("PyTorch's profiler is not loaded in this process")
        if sys.modules["torch"].autograd._profiler_enabled() or getattr(autograd, "_is_profiler_enabled", False):
            raise Refused("the job's own profiler runs")
        self._profile = profiler._KinetoProfile(activities=_activities(profiler), **options)
        self._guard(autograd)
        self._records = self._starts = True
        self._profile.start()
        self._starts = False

    def step(self) -> None:
        if get_ident() != self.thread:
            return
        self._steps += 1
        self._left -= 1
        if self._words[WANTED] != self._word | BEGUN:
            self._lost = self._lost or "nobody waits for it any more"
        late = monotonic() > self._until
        if self._lost or late or not self._left:
            self.finish("it has taken too long" if late and self._left else "")

    def finish(self, why: str = "") -> None:
        """Writes what there is. why: not all that was wanted."""
        self._records = False
        self._profile.stop()
        self.release()
        if self._lost:  # there may be nothing any more, and PyTorch 2 dies of writing that
            self.end(self._lost)
            return
        self._write()
        self.end(why, self._to)

    def _write(self) -> None:
        new = "%s.%d.new" % (self._to, os.getpid())
        try:
            self._profile.export_chrome_trace(new)
            os.replace(new, self._to)
        except BaseException:
            if os.path.exists(new):
                os.unlink(new)
            raise

    def end(self, why: str, path: str = "") -> None:
        """Says what has become of it."""
        global _running
        if _running is self:
            _running = None
        try:
            if self._records:
                self._profile.stop()
        except Exception:
            pass  # it has not begun, then
        self._records = False
        self._profile = None
        self.release()
        try:
            new = "%s.%d.new" % (self._request, os.getpid())
            with open(new, "w", encoding="utf-8") as f:
                json.dump(self._result(path, why), f)
            os.replace(new, self._request + ".done")
        except OSError:
            pass  # who waits for it hears by the word that it has ended
        if self._words[WANTED] in (self._word | BEGUN, STOP):  # no other one is wanted yet
            self._words[WANTED] = 0

    def _result(self, path: str, why: str) -> Dict[str, Any]:
        return {"word": self._word, "path": path, "steps": self._steps, "error": why}

    def _guard(self, autograd: Any) -> None:
        self._autograd = autograd
        for name in _GUARDED:
            function = getattr(autograd, name, None)
            if function is not None:
                self._guarded[name] = function
                setattr(autograd, name, self._yielding(function))

    def _yielding(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the profiler before whose call ours ends."""

        def first_ours(*args: Any, **kwargs: Any) -> Any:
            try:
                self._give_way()
            except Exception as e:
                self.end(_why(e))
            return function(*args, **kwargs)

        return first_ours

    def _give_way(self) -> None:
        mine = get_ident() == self.thread
        if mine and self._starts:
            return
        if self is not _running or os.getpid() != self._pid:
            self.release()
        elif mine:
            self.finish("the job has begun to profile itself")
        else:
            self._lost = "the job has begun to profile itself in another thread"

    def release(self) -> None:
        """The profiler's functions are what they were."""
        while self._guarded:
            name, function = self._guarded.popitem()
            setattr(self._autograd, name, function)


class _Seconds(_Recording):
    """Of all threads, by one that does nothing else. Any of them may have to end it."""

    def __init__(self, words: memoryview, word: int, path: str) -> None:
        super().__init__(words, word, path)
        self.written = allocate_lock()  # free when all is over
        self.written.acquire()
        self._first = allocate_lock()  # of the thread that stops the profiler
        self._stopped = allocate_lock()  # free when it is stopped
        self._stopped.acquire()
        self._cause = ""  # why it is stopped early
        self._begun = self._took = 0.0

    def begin(self) -> None:
        request = self._read()
        lasts = float(request["seconds"])
        options = _all_threads()
        self._begun, before, steps = monotonic(), _resident(), self._words[STEPS]
        self._start(with_stack=True, experimental_config=options)
        while monotonic() < self._begun + lasts and self._stopped.locked():
            sleep(0.1)
            if self._words[WANTED] != self._word | BEGUN:
                self._lost = "nobody waits for it any more"
                break
            if _resident() > before + _ROOM:
                self._cause = "it has taken %d MiB of memory" % (_ROOM >> 20)
                break
        self.halt(self._cause)
        self._steps = self._words[STEPS] - steps
        if self._lost:
            self.end(self._lost)
            return
        self._write()
        self.end(self._cause, self._to)

    def halt(self, why: str) -> None:
        """Returns when nothing is recorded any more."""
        if self._first.acquire(False):
            self._cause, self._took = why, monotonic() - self._begun
            _add_waits(self._profile)
            try:
                self._profile.stop()
            finally:
                self._records = False
                self.release()
                self._stopped.release()
        elif get_ident() != self.thread and self._stopped.acquire(True, _WRITING):
            self._stopped.release()

    def end(self, why: str, path: str = "") -> None:
        try:
            super().end(why, path)
        finally:
            if self.written.locked():
                self.written.release()

    def _result(self, path: str, why: str) -> Dict[str, Any]:
        return dict(super()._result(path, why), seconds=round(self._took, 3))

    def _give_way(self) -> None:
        if self is not _running or os.getpid() != self._pid:
            self.release()
        elif get_ident() != self.thread:
            self.halt("the job has begun to profile itself")


def _all_threads() -> Any:
    """The option by which PyTorch's profiler records all threads."""
    torch = sys.modules["torch"]
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except (AttributeError, TypeError):
        raise Refused("a profile needs PyTorch 2.7 or newer, and this is %s" % torch.__version__)


def _add_waits(profile: Any) -> None:
    """PyTorch's counters of waits go into the trace, by their handler of its own worker server, which need not run."""
    try:
        c10d = sys.modules["torch"]._C._distributed_c10d
        answer: List[str] = []
        kinds = {"set_content": lambda self, content, kind: answer.append(content), "set_status": lambda self, n: None}
        c10d._get_handler("wait_counter_values")(c10d._Request(), type("Answer", (c10d._Response,), kinds)())
        profile.add_metadata_json("wait_counters", answer[0])
    except Exception:
        pass  # this PyTorch has none


def _resident() -> int:
    """Bytes of memory of this process."""
    with open("/proc/self/statm", "rb") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Refused(Exception):
    """There can be no timeline now."""


def _activities(profiler: Any) -> List[Any]:
    """What can be recorded: a device only if this process uses it."""
    kinds = profiler.ProfilerActivity
    cuda = getattr(sys.modules["torch"], "cuda", None)
    idle = {getattr(kinds, "CUDA", None)} if cuda is None or not cuda.is_initialized() else set()
    devices = (k for k in profiler.supported_activities() if k != kinds.CPU and k not in idle)
    return [kinds.CPU] + sorted(devices, key=str)


def _why(e: BaseException) -> str:
    if isinstance(e, Refused):
        return str(e)
    return traceback.format_exception_only(type(e), e)[-1].strip()[:500]


def _foreign(e: BaseException) -> bool:
    """Whether code of the job has raised it, while this ran: a signal handler."""
    at = e.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None:
        return False
    file = os.path.abspath(at.tb_frame.f_code.co_filename)
    torch = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or "/none/x")
    if _below(file, os.path.dirname(os.path.abspath(__file__))) or _below(file, torch):
        return False
    standard = _below(file, os.path.dirname(os.path.abspath(os.__file__)))
    return not (standard and "-packages" + os.sep not in file)


def _below(file: str, dir: str) -> bool:
    return file.startswith(dir + os.sep)
