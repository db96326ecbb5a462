"""A notebook of Jupyter that launches its own functions. It is interrupted, and its kernel is killed."""
import os
import signal
import sys
import time

from jupyter_client.manager import start_new_kernel

DEFINITIONS = """
import os, time
from dlrover_run import launch
class Thing:
    def __init__(self, size):
        self.size = size
def grow(thing):
    print("rank", os.environ["RANK"], "grows")
    return Thing(thing.size + 1)
def wait(path):
    with open(path + os.environ["RANK"], "w") as f:
        f.write("%d" % os.getpid())
    time.sleep(600)
"""
USE = """
found = launch(grow, (Thing(3),), nproc_per_node=2)
print({rank: (type(t) is Thing, t.size) for rank, t in found.items()})
"""


def main(directory):
    manager, client = start_new_kernel()
    try:
        execute(client, DEFINITIONS)
        output = execute(client, USE)
        for want in ("rank 0 grows", "rank 1 grows", "{0: (True, 4), 1: (True, 4)}", "workers started"):
            assert want in output, output
        print("launched")

        path = os.path.join(directory, "interrupted")
        message = client.execute("launch(wait, (%r,), nproc_per_node=2)" % path, stop_on_error=False)
        pids = read_pids(path)
        manager.interrupt_kernel()
        assert "KeyboardInterrupt" in output_of(client, message)
        await_end(pids)
        print("interrupted")

        path = os.path.join(directory, "killed")
        client.execute("launch(wait, (%r,), nproc_per_node=2)" % path)
        pids = read_pids(path)
        os.kill(manager.provisioner.pid, signal.SIGKILL)
        await_end(pids)
        print("killed")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def execute(client, code):
    return output_of(client, client.execute(code))


def output_of(client, message):
    """Is all that a cell prints, its exception included."""
    text = ""
    while True:
        m = client.get_iopub_msg(timeout=120)
        if m["parent_header"].get("msg_id") != message:
            continue
        content = m["content"]
        text += content.get("text", "") + "".join(content.get("traceback", []))
        if m["msg_type"] == "status" and content["execution_state"] == "idle":
            return text


def read_pids(path):
    return [int(until(lambda: read(path + rank))) for rank in "01"]


def read(path):
    try:
        with open(path) as f:
            return f.read()
    except FileNotFoundError:
        return ""


def await_end(pids):
    for pid in pids:
        until(lambda: not os.path.exists("/proc/%d" % pid))


def until(condition):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise TimeoutError


if __name__ == "__main__":
    main(sys.argv[1])
