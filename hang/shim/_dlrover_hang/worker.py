"""How far this process is: steps and phases, as its threads do them, and the thread that publishes the rest.

Everything here runs within the job: it is short, takes no lock that the job could wait for, and raises nothing. Signal
handlers may interrupt it anywhere, come back to it, or raise what is not ours to catch.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import time
from _thread import get_ident, get_native_id
from time import monotonic_ns
from typing import Any, Dict, List, Optional, Tuple

from . import environ, process
from .groups import Groups
from .looks import Looks
from .page import (BEGUN, BLOCKED, CHECKPOINT, END, EVAL, HEARTBEAT, INIT, LAST_STEP, PHASE, SPAN_RING, SPAN_SLOTS,
                   SPANS, STEP_RING, STEP_SLOTS, STEPS, THREAD, TIMED, TRAIN, UNKNOWN, WANTED, Place, Taken, claim)
from .recorder import Recorder

_TICK = 0.5  # seconds between two looks at the process groups
_RETRY = 5 * 10**9  # ns between two attempts to claim a page that another process has
_LOOK = 5 * 10**7  # ns between two steps that take along the number of a group
_SHORT = 10**6  # ns: shorter phases leave no span
_BELIEVED = 3  # times that an evaluation may end by a step: a model that is no part of the training is in that mode

_words: Optional[memoryview] = None  # the page, once this process has claimed it
_publisher: Optional["_Publisher"] = None
_timeline = ""  # the file of who asks for one
_trainer = 0  # the thread whose phases count
_lead = 0  # the kernel's id of the thread that has made the last step, or the process group before
_outer: List[int] = []  # the words of the phases around the present one
_after: int = 0  # ns: no attempt to claim before
_generation = 0  # how many worlds of torch.distributed there have been, with the one that is being made
_training = False  # the present phase, or the outermost one, is TRAIN
_looked = 0  # ns: when a step has taken along the number of a group
_evaluating = False  # the innermost phase of _outer, or the present one, is EVAL by Module.eval
_doubts = 0
_zeroed: Dict[int, int] = {}  # the number of steps when optimizers, by their ids, were told to zero_grad
_kept: List[Any] = []  # mappings of the parent: to unmap them would close a descriptor that may be another file's by now


def step() -> None:
    """An optimizer has stepped."""
    try:
        words = _words
        if words is None:
            words = _claimed()
            if words is None:
                return
        now = monotonic_ns()
        n = words[STEPS]
        words[STEP_RING + n % STEP_SLOTS] = now
        words[LAST_STEP] = now
        words[STEPS] = n + 1
        if get_native_id() != _lead:  # the other identity may be one of a thread that has ended
            _trains_here(words)
        if _outer or not _training:
            _trains(words, n, now)
        if now - _looked > _LOOK:
            _look(words, n, now)
        _publisher.looks.step(now)  # type: ignore[union-attr]
    except Exception as e:
        process.unless_ours(e)
        return
    if words[WANTED]:
        try:
            from . import timeline
        except Exception:  # the launcher that has put us there may be gone
            words[WANTED] = 0
            return
        timeline.step(words, _timeline)


def _trains_here(words: memoryview) -> None:
    """This thread trains. One that PyTorch has started only helps another one, which is in backward."""
    global _lead
    threading = sys.modules.get("threading")
    if threading is not None:
        thread = threading._active.get(get_ident())
        if thread is None or type(thread) is threading._DummyThread:
            return
    _lead = words[THREAD] = get_native_id()


def _look(words: memoryview, step: int, now: int) -> None:
    """Takes along the number of one group: whoever is stopped now has published what it has done."""
    global _looked
    _looked = now
    hot = _publisher.groups.hot  # type: ignore[union-attr]
    if hot:
        at, reference = hot[step % len(hot)]
        group = reference()
        if group is not None:
            seq = group._get_sequence_number_for_group()
            if seq != words[at + 1]:
                words[at + 1], words[at + 2] = seq, now


def zeroed(optimizer: int) -> None:
    """An optimizer, of that id, begins to collect gradients. If none has stepped since it did that last, then it has
    without our knowing."""
    try:
        if _zeroed.get(optimizer) == _steps():
            step()
        elif len(_zeroed) > 64:
            _zeroed.clear()
        _zeroed[optimizer] = _steps()
    except Exception as e:
        process.unless_ours(e)


def _steps() -> int:
    words = _words
    return 0 if words is None else words[STEPS]


def enter(phase: int) -> int:
    """A phase begins. Returns what leave() wants to know, 0 if that need not be called."""
    try:
        words = _words
        if words is None or get_ident() != _trainer:
            return 0
        word = monotonic_ns() // 1000 << 8 | phase
        _outer.append(words[PHASE])
        words[PHASE] = word
        return len(_outer)
    except Exception as e:
        process.unless_ours(e)
        return 0


def leave(depth: int) -> None:
    """The phase that began at that depth has ended, and the one around it goes on."""
    try:
        words = _words
        if words is None or len(_outer) < depth:
            return  # a step has ended it, or this is the child of the process where it began
        word, now = words[PHASE], monotonic_ns()
        outer = words[PHASE] = _outer[depth - 1]
        del _outer[depth - 1:]
        _span(words, word, now)
        if word & 255 == CHECKPOINT != outer & 255 and words[STEPS]:
            words[BLOCKED] += now - (word >> 8) * 1000
    except Exception as e:
        process.unless_ours(e)


def begin_world() -> int:
    """init_process_group begins: who calls it trains. Returns what end_world() wants to know."""
    global _generation
    _generation += 1
    try:
        if _words is None:
            _claimed()
        elif not _words[STEPS]:
            _trains_here(_words)
    except Exception as e:
        process.unless_ours(e)
    return enter(INIT)


def end_world(depth: int, made: bool) -> None:
    """It has ended. made: and there is a world."""
    global _generation
    if not made:
        _generation -= 1
    leave(depth)


def eval_begins() -> None:
    """A module is set to evaluation mode. It lasts until a module is set to training mode, or a step."""
    global _evaluating
    words = _words
    if words is None or _evaluating or _outer or _doubts >= _BELIEVED or get_ident() != _trainer:
        return
    _evaluating = True
    _begin(words, EVAL, monotonic_ns())


def eval_ends() -> None:
    global _evaluating, _doubts
    words = _words
    if words is None or not _evaluating or _outer or get_ident() != _trainer:
        return
    _evaluating, _doubts = False, 0
    _begin(words, TRAIN if words[STEPS] else UNKNOWN, monotonic_ns())


def _trains(words: memoryview, steps: int, now: int) -> None:
    """Whatever a step comes after has ended. steps: how many were before it."""
    global _trainer, _evaluating, _doubts
    if steps == 0:
        _trainer = get_ident()
    elif get_ident() != _trainer:
        return
    if _evaluating:
        _evaluating, _doubts = False, _doubts + 1
    del _outer[:]
    _begin(words, TRAIN, now)


def _begin(words: memoryview, phase: int, now: int) -> None:
    """A phase that is in no other one."""
    global _training
    _training = phase == TRAIN
    word = words[PHASE]
    words[PHASE] = now // 1000 << 8 | phase
    _span(words, word, now)


def _span(words: memoryview, word: int, now: int) -> None:
    """The phase of a word has ended."""
    if word & 255 in (UNKNOWN, TRAIN) or now - (word >> 8) * 1000 < _SHORT:
        return
    n = words[SPANS]
    at = SPAN_RING + 2 * (n % SPAN_SLOTS)
    words[at], words[at + 1] = word, now
    words[SPANS] = n + 1


def _claimed() -> Optional[memoryview]:
    """The page, if it is there for this process to claim. It is tried now and then."""
    global _words, _publisher, _trainer, _after, _timeline
    now = monotonic_ns()
    if now < _after:
        return None
    _after = now + _RETRY
    try:
        from . import born  # a fork may have begun anew

        place = Place(environ if os.getpid() == born else os.environ)
        mapping = claim(place)
    except (KeyError, ValueError, OSError, Taken) as e:
        process.unless_ours(e)
        return None
    process.allow_tracer(os.environ)
    _trainer, _timeline = get_ident(), place.timeline
    _words = memoryview(mapping).cast("Q")
    _trains_here(_words)
    _publisher = _Publisher(_words, Groups(_words, place), Recorder(place.rank))
    _publisher.start()
    atexit.register(_end, os.getpid())
    return _words


class _Publisher:
    """A thread that tells that it runs, and what the process groups do. It is none of threading's: nobody who lists or
    joins those has to do with it."""

    def __init__(self, words: memoryview, groups: Groups, recorder: Recorder) -> None:
        self.groups = groups
        self.looks = Looks(words, groups)
        self._recorder = recorder
        self._words = words
        self._stop = _thread.allocate_lock()
        self._busy = _thread.allocate_lock()  # while it is in PyTorch

    def start(self) -> None:
        self._stop.acquire()
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:
            pass  # no room for one more thread: steps and phases are published all the same

    def stop(self) -> None:
        """Returns when the thread has left PyTorch for good: one that the end of the interpreter finds there would end
        the process by a signal."""
        self._stop.release()
        self._busy.acquire(True, 1)

    def _run(self) -> None:
        process.name_thread("dlrover-hang")
        published = monotonic_ns()
        while not self._stopped():
            now = monotonic_ns()
            if not self._busy.acquire(False):
                return
            try:
                if self.looks.wanted():
                    self.looks.look(now)
                if now - published >= _TICK * 10**9:
                    published = now
                    self._publish(now)
            except Exception:
                pass  # PyTorch is at it, or it is of a kind that we do not know
            finally:
                self._busy.release()

    def _publish(self, now: int) -> None:
        self._words[HEARTBEAT] = now
        if self._words[WANTED] & (TIMED | BEGUN) == TIMED:
            _record(self._words)
        self.groups.publish(_generation, now)
        self._recorder.look(self.groups.backends())

    def _stopped(self) -> bool:
        pause = self.looks.pause(monotonic_ns()) if self.looks.wanted() else _TICK
        if sys.version_info >= (3, 11):
            return self._stop.acquire(True, pause)
        time.sleep(pause)  # a lock's patience is the wall clock's there, and that may be set
        return self._stop.acquire(False)


def _record(words: memoryview) -> None:
    """A profile is wanted: a thread of its own makes it, and this one goes on."""
    word = words[WANTED]
    words[WANTED] = word | BEGUN
    try:
        from . import timeline

        _thread.start_new_thread(timeline.record, (words, word, _timeline))
    except Exception:
        words[WANTED] = 0  # the asker hears that there is no profile


def _end(pid: int) -> None:
    """The interpreter ends."""
    words = _words
    if words is None or pid != os.getpid():
        return
    del _outer[:]
    if words[WANTED] and __package__ + ".timeline" in sys.modules:
        from . import timeline

        timeline.end()
    if _publisher is not None:
        _publisher.stop()
    _begin(words, END, monotonic_ns())


def _in_child() -> None:
    """A fork has made this process. The page is its parent's, and so is what was done there."""
    global _words, _publisher, _trainer, _lead, _after, _generation, _evaluating, _training, _doubts
    _kept.append((_words, _publisher))
    _words = _publisher = None
    _trainer = _lead = _after = _generation = _doubts = 0
    _evaluating = _training = False
    del _outer[:]
    _zeroed.clear()
    timeline = sys.modules.get(__package__ + ".timeline")
    if timeline is not None:
        timeline.forget()


os.register_at_fork(after_in_child=_in_child)
