"""Functions as jobs, in a script without PyTorch. Its argument is the part that is to be tried."""
import os
import signal
import sys
import threading
import time
from functools import partial

from dlrover_run import ChildFailedError, Unsendable, launch


class Thing:
    def __init__(self, size):
        self.size = size


def rank():
    return int(os.environ["RANK"])


def add(thing, n):
    return Thing(thing.size + n + rank())


def leave():
    sys.exit(0)


def count_restarts():
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if restarts == 0 and rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return restarts


def fail(n):
    if rank() == n:
        raise ValueError("bad batch of rank %d" % n)
    time.sleep(600)


def die():
    if rank() == 0:
        os._exit(7)
    time.sleep(600)


def wait(path):
    with open("%s.%d" % (path, rank()), "w") as f:
        f.write("%d" % os.getpid())
    print("rank %d waits" % rank(), flush=True)
    time.sleep(600)


def unsendable():
    return threading.Lock()


def here():
    return os.getcwd(), sys.argv, "worker" in sys.modules


two = partial(launch, nproc_per_node=2, log_format="text")


def values():
    """Classes of this script, restarts, exits, and a result that cannot travel."""
    found = two(add, (Thing(2), 5))
    assert [type(t) is Thing and t.size for t in found.values()] == [7, 8], found
    assert list(found) == [0, 1]
    assert two(leave) == {0: None, 1: None}
    assert two(count_restarts, max_restarts=1) == {0: 1, 1: 1}
    assert two(count_restarts, max_restarts=1, warm=True, virtual_local_rank=True) == {0: 1, 1: 1}
    assert two(here, workdir="/")[1] == ("/", sys.argv, False)
    try:
        two(unsendable)
        raise AssertionError
    except Unsendable as e:
        print(e)


def failures():
    try:
        two(fail, (1,))
        raise AssertionError
    except ChildFailedError as e:
        first, failure = e.get_first_failure()
        assert (first, failure.local_rank, failure.exitcode) == (1, 1, 1), e.failures
        assert failure.message == "ValueError: bad batch of rank 1", failure.message
        assert list(e.failures) == [1] and e.status == 1
        print(e)
    try:
        two(die, exit_code_policy="reason")
        raise AssertionError
    except ChildFailedError as e:
        assert e.get_first_failure()[1][3] == 7 and e.status == 10, e
        assert e.get_first_failure()[1].message == "exit status 7"


def refused():
    for error, call in (
            (TypeError, partial(two, 5)), (TypeError, partial(two, add, 5)), (ValueError, partial(two, add, nope=3)),
            (ValueError, partial(two, add, no_python=True)), (ValueError, partial(launch, add, nproc_per_node="x"))):
        try:
            call()
            raise AssertionError
        except error as e:
            print(e)


def node():
    print(launch(rank, nnodes=2, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint=sys.argv[2], rdzv_id="two",
                 rdzv_conf={"join_timeout": 60, "is_host": sys.argv[3] == "host"}))


def interrupted():
    try:
        two(wait, (sys.argv[2],), shutdown_timeout=5)
    except KeyboardInterrupt:
        print("interrupted")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
