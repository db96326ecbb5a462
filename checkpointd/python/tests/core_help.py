"""What the tests of the engine share."""

from __future__ import annotations

import ctypes
import os
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import unittest
import zlib

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
              "DLROVER_CKPT_RUNTIME", "DLROVER_CKPT_SHM", "DLROVER_CKPT_EPOCH", "DLROVER_CKPT_RUN",
              "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID")


class Case(unittest.TestCase):
    """A checkpoint directory, a place for segments, and a clean environment."""

    def setUp(self) -> None:
        self.top = tempfile.mkdtemp(prefix="dlrover-ckpt-test-")
        self.addCleanup(shutil.rmtree, self.top, True)
        self.addCleanup(_close_pools)
        self.dir = os.path.join(self.top, "ckpt")
        self.shm = os.path.join(self.top, "shm")
        os.mkdir(self.shm)
        before = {k: os.environ.pop(k, None) for k in _VARIABLES}
        self.addCleanup(_restore, before)
        os.environ["DLROVER_CKPT_SHM"] = self.shm

    def launched(self) -> str:
        """Pretends that a launcher has made the runtime directory."""
        runtime = os.path.join(self.top, "run")
        os.mkdir(runtime, 0o700)
        os.environ["DLROVER_CKPT_RUNTIME"] = runtime
        return runtime

    def child(self, code: str, **env: str) -> subprocess.Popen:
        """A Python process with the test's directories as `dir` and `top`."""
        head = "import os, sys\nsys.path.insert(0, %r)\ndir, top = %r, %r\n" % (ROOT, self.dir, self.top)
        p = subprocess.Popen([sys.executable, "-W", "ignore", "-c", head + textwrap.dedent(code)],
                             env=dict(os.environ, **env), stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             universal_newlines=True)
        self.addCleanup(_end, p)
        return p

    def finish(self, p: subprocess.Popen, code: int = 0, timeout: float = 90) -> str:
        out, err = p.communicate(timeout=timeout)
        self.assertEqual(p.returncode, code, err[-3000:])
        return out

    def world(self, code: str, ranks: int = 2, **env: str) -> list:
        """Runs code in processes that form a gloo group; returns what they print."""
        port = str(_free_port())
        head = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\nrank = dist.get_rank()\n"
        tail = "\nsys.stdout.flush()\nsys.stderr.flush()\nos._exit(0)\n"  # gloo's threads may abort a normal exit
        ps = [self.child(head + textwrap.dedent(code) + tail, RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(ranks),
                         LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1",
                         GLOO_SOCKET_IFNAME="lo", DLROVER_CKPT_EPOCH=env.get("DLROVER_CKPT_EPOCH", "e"))
              for r in range(ranks)]
        return [re.sub(r"(?m)^\[Gloo\] .*\n", "", self.finish(p)) for p in ps]  # some versions of gloo say who is there


def _close_pools() -> None:
    """Ends what prepares segments in the background, and lets go of the segments."""
    from dlrover_ckpt import pool

    for p in pool._pools.values():
        p.close()
    pool._pools.clear()


def _restore(before: dict) -> None:
    for k, v in before.items():
        os.environ.pop(k, None)
        if v is not None:
            os.environ[k] = v


def _end(p: subprocess.Popen) -> None:
    if p.poll() is None:
        p.kill()
    p.wait()
    for f in (p.stdin, p.stdout, p.stderr):
        f.close()


def _free_port() -> int:
    """A port below those that the kernel gives to connections of other tests."""
    while True:
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", random.randrange(15000, 30000)))
                return s.getsockname()[1]
            except OSError:
                pass


def render(image) -> bytearray:
    """The file that an image is, by its public lists, with its checksums. What nothing covers stays 0xEE."""
    out = bytearray(b"\xee" * image.length)
    for off, data in image.pieces:
        out[off:off + len(data)] = data
    for off, n, storage in image.tensors:
        out[off:off + n] = ctypes.string_at(storage.data_ptr(), n)
    end = 0
    for off, n, dst1, dst2 in image.fixups:
        assert off >= end
        end = off + n
        for dst in (dst1, dst2):
            if dst:
                struct.pack_into("<I", out, dst, zlib.crc32(memoryview(out)[off:off + n]))
    return out
