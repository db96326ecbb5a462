"""A launcher for tests: it starts parents, lets them fork, and waits for the workers, which it adopts."""

import array
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(HERE)
SHIM = os.path.abspath(os.path.join(TREE, "../../../hang/shim"))
PARENT = os.path.join(TREE, "_dlrover_warm", "parent.py")
PATH = os.pathsep.join([SHIM, TREE])
WAIT = 120  # seconds, for what happens at once


def adopt_orphans():
    """Makes this process the parent of its descendants that lose theirs."""
    PR_SET_CHILD_SUBREAPER = 36
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def send(connection, message, *fds):
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([json.dumps(message).encode()], rights)


def receive(connection):
    """A message, None at the end. A file beside it is read into the message."""
    connection.settimeout(WAIT)
    packet, controls, _, _ = connection.recvmsg(1 << 16, 1024)
    if not packet:
        return None
    message = json.loads(packet.decode())
    for _, _, data in controls:
        fds = array.array("i")
        fds.frombytes(data)
        for fd in fds:
            with os.fdopen(fd, "rb") as f:
                f.seek(0)
                message.update(json.loads(f.read().decode()))
    return message


def memfd(value):
    f = tempfile.TemporaryFile()
    f.write(json.dumps(value).encode())
    f.flush()
    return f


def pair():
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Parent:
    def __init__(self, *options, python=sys.executable, env=None, cwd=None, stderr=None):
        self.wire, theirs = pair()
        self.python, self.options, self.env = python, list(options), dict(os.environ if env is None else env)
        path = [p for p in [PATH, self.env.get("PYTHONPATH")] if p]
        self.env.update(DLROVER_WARM="parent", PYTHONPATH=os.pathsep.join(path))
        self.process = subprocess.Popen([python] + self.options + [PARENT], stdin=theirs, env=self.env, cwd=cwd,
                                        stdout=stderr, stderr=stderr, start_new_session=True)
        theirs.close()

    def prepare(self, *modules, **more):
        send(self.wire, dict(dict(op="prepare", modules=modules, deny=[], launcher=os.getpid()), **more))
        return self.answer()

    def answer(self):
        """An answer; the files of the modules, which follow, are read into it."""
        said = receive(self.wire)
        if said["op"] == "prepared":
            said.update(receive(self.wire), op=said["op"])
        return said

    def prepare_urgently(self, forks, *modules, **more):
        """The answer, and the connections to children that are going to be parked: asked for before the answer."""
        said = self.prepare(*modules, urgent=True, **more)
        assert said == {"op": "imported"}, said
        wires = [self.asked(True) for _ in range(forks)]
        return self.answer(), wires

    def fork(self, urgent=False):
        """A child that is parked."""
        return Worker(self, self.asked(urgent))

    def asked(self, urgent):
        """The connection to a child that is going to be parked."""
        ours, theirs = pair()
        send(self.wire, {"op": "fork", "urgent": urgent}, theirs.fileno())
        theirs.close()
        return ours

    def close(self):
        self.wire.close()
        return self.process.wait(WAIT)


class Worker:
    def __init__(self, parent, wire, pid=None):
        self.parent, self.wire, self.pid = parent, wire, pid
        if pid is None:
            self.parked = receive(wire)
            self.pid = self.parked["pid"] if self.parked else None

    def run(self, *argv, stdin=None, stdout=None, stderr=None, env=None, **more):
        """Sends the job and returns the answer. The streams are files."""
        env = self.parent.env if env is None else env
        job = dict(dict(argv=[self.parent.python] + self.parent.options + list(argv),
                        env=["%s=%s" % e for e in env.items()], cwd=os.getcwd(), cpus=None), **more)
        streams = [open(os.devnull, "r+b") if s is None else s for s in (stdin, stdout, stderr)]
        with memfd(job) as f:
            send(self.wire, {"op": "run"}, f.fileno(), *[s.fileno() for s in streams])
        answer = receive(self.wire)
        if answer is not None and answer["op"] == "running":
            assert receive(self.wire) is None
        self.wire.close()
        return answer

    def wait(self):
        """How it has ended, as subprocess says it."""
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            time.sleep(0.002)
        os.kill(self.pid, signal.SIGABRT)
        raise AssertionError("%d does not end" % self.pid)
