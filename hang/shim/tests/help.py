"""Runs programs as a worker's Python runs, and reads the pages that they leave."""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import textwrap
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
SHIM = os.path.dirname(HERE)
FAKE = os.path.join(HERE, "fake")

PRELUDE = """
import os, sys, time
def page(local=0):
    import help
    return help.Page(os.environ["DLROVER_HANG_DIR"], local)
def wait(what):
    for _ in range(1000):
        if what():
            return
        time.sleep(0.02)
    raise AssertionError("it does not become true")
"""


class Page:
    """What a page says, by the layout that Go has."""

    def __init__(self, dir, local=0):
        with open(os.path.join(dir, "l%d.page" % local), "rb") as f:
            w = self.words = struct.unpack("<512Q", f.read())
        self.pid, self.start, self.rank, self.world_size, self.local, self.created, self.heartbeat = w[1:8]
        self.steps, self.last_step = w[8:10]
        self.phase, self.since = w[10] & 255, w[10] >> 8
        self.thread, self.blocked = w[12], w[14] / 1e9
        self.groups = {w[i]: w[i + 1] for i in range(16, 160, 3) if w[i]}
        self.step_times = [w[160 + n % 192] for n in range(max(0, self.steps - 191), self.steps)]
        self.spans = [(w[352 + 2 * (n % 64)] & 255, (w[353 + 2 * (n % 64)] - (w[352 + 2 * (n % 64)] >> 8) * 1000) / 1e9)
                      for n in range(max(0, w[11] - 63), w[11])]
        # of the groups by id: steps with looks, mean position, mean of its squares, share of full looks
        self.sums = {}
        for slot in range(w[15]):
            a, b = w[480 + 2 * slot:482 + 2 * slot]
            if w[16 + 3 * slot] and a >> 32:
                n = a >> 32
                self.sums[w[16 + 3 * slot]] = (n, (a & (1 << 32) - 1) / n / 65536 - 1, (b >> 32) / n / 65536,
                                               (b & 65535) / n / 64)
        self.about = {}
        try:
            with open(os.path.join(dir, "l%d.groups" % local)) as f:
                self.about = {g["id"]: g for g in json.load(f)}
        except FileNotFoundError:
            pass

    def seq(self, name):
        """Of the group of that name."""
        return [s for i, s in self.groups.items() if self.about[i]["name"] == name][0]


class Case(unittest.TestCase):
    maxDiff = None
    path = [SHIM, HERE]  # PYTHONPATH

    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="dlrover-hang-test-")
        self.addCleanup(shutil.rmtree, self.dir)
        self.pages = os.path.join(self.dir, "pages")
        os.mkdir(self.pages, 0o700)
        self.env = dict(os.environ, PYTHONDONTWRITEBYTECODE="1",
                        PYTHONWARNINGS="ignore::DeprecationWarning", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1",
                        DLROVER_HANG_DIR=self.pages, PYTHONPATH=os.pathsep.join(self.path))

    def popen(self, code, *options, **env):
        """A program; it has page() and wait()."""
        return subprocess.Popen([sys.executable] + list(options) + ["-c", PRELUDE + textwrap.dedent(code)],
                                env=dict(self.env, **env), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, universal_newlines=True)

    def end(self, process, rc=0, stderr=""):
        out, err = process.communicate(timeout=300)
        self.assertEqual((process.returncode, err), (rc, stderr), out)
        return out

    def run_code(self, code, *options, **env):
        """What a program prints. It says nothing else, and ends well."""
        return self.end(self.popen(code, *options, **env))

    def page(self, local=0):
        return Page(self.pages, local)

    def claimed(self):
        """The files that are there."""
        return sorted(os.listdir(self.pages))
