"""Runs scripts in forks of this process, which has imported PyTorch once: argv[1] is the socket that it listens on.

A connection is one run: a line of JSON {"argv": [script or -m module, ...], "env": {...}, "output": file} is answered
with the process's id and, when it has ended, its exit code, each on a line. The process ends with its standard input.
"""

import json
import os
import runpy
import select
import socket
import sys

import torch.distributed.run


def start(request):
    """Returns in the fork as in a new process: what it prints goes to the file, and its group is its own."""
    out = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in (null, 0), (out, 1), (out, 2):
        os.dup2(source, target)
    os.closerange(3, 256)
    os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["argv"]


def answer(conn):
    """Is the parent of one run, and returns its request in the fork that runs it."""
    lines = conn.makefile("rw")
    request = json.loads(lines.readline())
    pid = os.fork()
    if pid == 0:
        return request
    print(pid, file=lines, flush=True)
    _, status = os.waitpid(pid, 0)
    print(-os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), file=lines, flush=True)
    os._exit(0)


def serve(listener):
    """Returns a request, in a fork, or None."""
    while True:
        ready, _, _ = select.select([sys.stdin, listener], [], [])
        if sys.stdin in ready:
            return None
        conn, _ = listener.accept()
        if os.fork() == 0:
            return answer(conn)
        conn.close()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(64)
print("ready", flush=True)
request = serve(listener)
if request:
    start(request)
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
