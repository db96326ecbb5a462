"""How a process makes way for those that train."""

import contextlib
import os


@contextlib.contextmanager
def gentle():
    """The lowest priority, if this process may go back to its own; otherwise it is only not given precedence when it
    wakes. Forks inherit what is set after it."""
    nice, policy = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        if _may_return(nice):
            os.setpriority(os.PRIO_PROCESS, 0, 19)
    except OSError:
        pass
    try:
        yield
    finally:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
            os.sched_setscheduler(0, policy, os.sched_param(0))
        except OSError:
            pass


def _may_return(nice):
    """Whether this process may lower its nice value again. A child tries it."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, 19)
            os.setpriority(os.PRIO_PROCESS, 0, nice)
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0
