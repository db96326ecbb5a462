"""Workers with PyTorch."""

import json
import os
import signal
import socket
import sys
import unittest

import torch

import help
from test_parent import Case

VERSION = tuple(int(x) for x in torch.__version__.split(".")[:2])
MODULES = ["torch", "numpy"] + (["torch._dynamo"] if VERSION >= (2, 0) else [])


class Shared(Case):
    """One parent for all tests: it takes its time."""

    @classmethod
    def setUpClass(cls):
        help.adopt_orphans()
        cls.pages = help.tempfile.mkdtemp(prefix="dlrover-warm-test-")
        env = dict(os.environ, PYTHONPATH="", OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1",
                   DLROVER_HANG_DIR=cls.pages, PYTHONWARNINGS="ignore")
        cls.parent = help.Parent("-u", env=env)
        cls.answer = cls.parent.prepare(*MODULES)
        assert cls.answer["op"] == "prepared", cls.answer

    @classmethod
    def tearDownClass(cls):
        help.shutil.rmtree(cls.pages)
        assert cls.parent.close() == 0

    def fork(self, text, *argv, **env):
        env.setdefault("DLROVER_HANG_DIR", self.dir)
        return self.run_in(self.parent, text, *argv, env=dict(self.parent.env, **env))

    def test_prepared(self):
        self.assertEqual((self.answer["failed"], self.answer["threads"]), ([], 1))
        self.assertTrue(any(p.endswith("torch/__init__.py") for p, _, _ in self.answer["files"]))

    def test_computes(self):
        out = self.fork("""
            import torch, numpy, torch.utils.data as data
            def main():
                x = torch.ones(300, 300, requires_grad=True)
                (x @ x).sum().backward()
                model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU())
                o = torch.optim.Adam(model.parameters())
                for how in (None, "fork"):  # from Python 3.14 on None is not fork
                    for batch in data.DataLoader([torch.ones(1, 8, 8)] * 8, batch_size=2, num_workers=2,
                                                 multiprocessing_context=how):
                        model(batch).sum().backward()
                        o.step()
                f = torch.jit.script(torch.nn.ReLU())
                product = numpy.ones((300, 300)) @ numpy.ones((300, 300))
                print(float(x.grad[0, 0]), float(product[0, 0]), f(torch.ones(1)).item())
            if __name__ == "__main__":
                main()
        """)
        self.assertEqual(out, "600.0 300.0 1.0\n")

    def test_numbers(self):
        text = """
            import torch, numpy, random
            print(torch.rand(1).item(), numpy.random.rand(), random.random(), torch.initial_seed())
            torch.manual_seed(1), numpy.random.seed(2), random.seed(3)
            print(torch.rand(1).item(), numpy.random.rand(), random.random())
        """
        a, b = (self.fork(text).splitlines() for _ in range(2))
        self.assertFalse(set(a[0].split()) & set(b[0].split()))
        self.assertEqual(a[1], b[1])

    def test_threads(self):
        text = """
            import torch, os, numpy
            numpy.ones((400, 400)) @ numpy.ones((400, 400))
            pools = []
            try:
                from _dlrover_warm import repair
                pools = [get() for get, _ in repair._pools]
            except ImportError: pass
            print(torch.get_num_threads(), pools)
        """
        cpus = len(os.sched_getaffinity(0))
        for env, n, blas in (({"OMP_NUM_THREADS": "1"}, 1, 1), ({"OMP_NUM_THREADS": "3"}, 3, min(3, cpus)),
                             ({"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}, 2, 1)):
            threads, pools = self.fork(text, **env).split(None, 1)
            self.assertEqual(int(threads), n)
            self.assertLessEqual(set(json.loads(pools)), {blas})

    def test_a_world(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        script = self.script("""
            import os, torch, torch.distributed as dist
            dist.init_process_group("gloo")
            torch.manual_seed(0)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
            o = torch.optim.SGD(model.parameters(), lr=0.1)
            for n in range(3):
                o.zero_grad()
                model(torch.ones(2, 4) * (dist.get_rank() + 1)).sum().backward()
                o.step()
            print(dist.get_rank(), sum(p.sum().item() for p in model.parameters()))
            with open(os.environ["DLROVER_HANG_DIR"] + "/l%d.page" % dist.get_rank(), "rb") as f:
                page = memoryview(f.read()).cast("Q")
                print(page[1] == os.getpid(), page[3], page[8], "TORCH_NCCL_TRACE_BUFFER_SIZE" in os.environ)
            dist.destroy_process_group()
        """)
        workers, outs = [self.parent.fork() for _ in range(2)], []
        for rank, w in enumerate(workers):
            out = open(os.path.join(self.dir, "o%d" % rank), "w+")
            self.addCleanup(out.close)
            outs.append(out)
            env = dict(self.parent.env, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=port, DLROVER_HANG_DIR=self.dir, TORCH_NCCL_TRACE_BUFFER_SIZE="20",
                       TORCH_FR_BUFFER_SIZE="20")
            self.assertEqual(w.run(script, env=env, stdout=out, stderr=self.err), {"op": "running"})
        self.assertEqual([w.wait() for w in workers], [0, 0], self.errors())
        texts = []
        for rank, out in enumerate(outs):
            out.seek(0)
            first, second = out.read().splitlines()
            old_name = VERSION < (2, 9)  # later ones warn about it
            self.assertEqual((first.split()[0], second), (str(rank), "True %d 3 %s" % (rank, old_name)))
            texts.append(first.split()[1])
        self.assertEqual(*texts)

    def test_children_and_pickles(self):
        self.fork("""
            import torch, torch.multiprocessing as mp, io
            class Net(torch.nn.Linear): pass
            def f(rank, q): q.put((rank, Net(1, 1).weight.numel()))
            if __name__ == "__main__":
                q = mp.get_context("spawn").SimpleQueue()
                mp.spawn(f, (q,), nprocs=1)
                assert q.get() == (0, 1)
                b = io.BytesIO(); torch.save(Net(1, 1), b); b.seek(0)
                assert type(torch.load(b, **({"weights_only": False} if torch.__version__ > "2" else {}))) is Net
        """)

    def test_pages(self):
        """Forks that nobody waits for have copies of the pages that a training writes."""
        parent = self.start()
        self.assertEqual(parent.prepare(*MODULES)["op"], "prepared")
        first, second = (int(self.run_in(parent, """
            import resource, torch, io
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            model = torch.nn.Linear(4, 4)
            o = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.ones(2, 4)).sum().backward()
            o.step()
            torch.save(model.state_dict(), io.BytesIO())
            print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        """, env=parent.env, urgent=urgent)) for urgent in (True, False))
        self.assertLess(second, 0.6 * first)

    def test_ends_as_a_fresh_one(self):
        """Also what libraries print when the interpreter ends."""
        worker = self.parent.fork()
        script = self.script("import torch%s\n1/0" % (", torch._dynamo" if VERSION >= (2, 0) else ""))
        answer = worker.run(script, stderr=self.err)
        self.assertEqual((answer, worker.wait()), ({"op": "running"}, 1))
        self.assertEqual(self.errors().splitlines()[-1], "ZeroDivisionError: division by zero")

    def test_learned(self):
        path = os.path.join(self.dir, "learned")
        out = self.fork("""
            import torch, os, wave
            model = torch.nn.Linear(1, 1)
            o = torch.optim.SGD(model.parameters(), lr=0.1)
            for n in range(3):
                model(torch.ones(1)).backward()
                assert os.path.exists(%r) == (n > 0)
                o.step()
                if n == 0: written = os.stat(%r).st_mtime_ns
            assert os.stat(%r).st_mtime_ns == written
            print(torch.optim.Optimizer._optimizer_step_code.__qualname__.rpartition(".")[2])
        """ % (path, path, path), DLROVER_WARM=path)
        self.assertEqual(out, "_optimizer_step_code\n")
        with open(path) as f:
            learned = json.load(f)
        self.assertEqual(learned["why"], "step")
        self.assertIn("wave", learned["modules"])
        self.assertEqual({"torch", "torch.optim.sgd", "numpy"} & set(learned["modules"]), set())  # the parent's


class Script(Case):
    def test_what_only_pytorch_2_has(self):
        """It is told only if somebody has asked for it."""
        script, later = self.script("import torch"), "torch._dynamo"
        self.assertEqual(self.start().prepare(script=script)["failed"], [])
        failed = self.start().prepare(later, script=script)["failed"]
        self.assertEqual({name for name, _ in failed}, set() if VERSION >= (2, 0) else {later})


class Unsafe(Case):
    def test_fatal_imports(self):
        """A parent in which an operation has run in parallel: its forks would hang."""
        self.module("fatal", "import torch\nx = torch.ones(999, 999, requires_grad=True)\n(x @ x).sum().backward()")
        self.module("fine", "import torch\ntorch.ones(9).sum()")
        answer = self.start(OMP_NUM_THREADS="2").prepare("fine", "fatal")
        self.assertEqual((answer["op"], answer["module"]), ("unsafe", "fatal"))

    def test_forks_during_a_trial(self):
        parent = self.start()
        answer, wires = parent.prepare_urgently(2, "torch")
        self.assertEqual(answer["op"], "prepared")
        for w in wires:
            self.assertEqual(self.run_in(parent, """
                import os, torch
                x = torch.ones(999, 999, requires_grad=True)
                (x @ x).sum().backward()
                print(float(x.grad[0, 0]), *[n for n in range(3, 99) if os.path.exists("/proc/self/fd/%d" % n)
                                             and os.readlink("/proc/self/fd/%d" % n).startswith("pipe:")])
            """, worker=help.Worker(parent, w)), "1998.0\n", "and has no pipe of the trial")

    def test_a_probe_that_hangs_or_dies(self):
        for text, why in (("time.sleep(1000)", "is stuck"), ("os.kill(os.getpid(), 11)", "ended by signal 11"),
                          ("raise OSError('broken')", "OSError('broken')"), ("os._exit(7)", "ended with code 7")):
            self.module("torch", "import os, time\ndef ones(*a, **k):\n    " + text)
            parent = self.start()
            answer = parent.prepare("torch", deadline=1)
            self.assertEqual(answer["op"], "unsafe")
            self.assertIn(why, answer["why"])

    def test_a_probe_imports_nothing_anew(self):
        """As from Python 3.14 on processes would that it starts by multiprocessing's default method."""
        seen = os.path.join(self.dir, "seen")
        self.module("spawns", "import multiprocessing as m, torch\nm.set_start_method('forkserver', True)\n"
                    "m.set_forkserver_preload(['spawns'])\nopen(%r, 'a').write('once\\n')" % seen)
        self.assertEqual(self.start().prepare("spawns")["op"], "prepared")
        with open(seen) as f:
            self.assertEqual(f.read(), "once\n")

    def test_a_probe_takes_along_what_it_has_started(self):
        self.module("torch", "import os, time\ndef ones(*a, **k):\n    os.fork()\n"
                    "    open(%r, 'a').write('%%d\\n' %% os.getpid())\n"
                    "    time.sleep(1000)" % os.path.join(self.dir, "pids"))
        self.assertIn("stuck", self.start().prepare("torch", deadline=1)["why"])
        with open(os.path.join(self.dir, "pids")) as f:
            pids = [int(line) for line in f]
        self.assertEqual(len(pids), 2)
        for pid in pids:
            try:
                os.kill(pid, 0)
                self.assertEqual(os.waitpid(pid, 0)[0], pid)
            except (ProcessLookupError, ChildProcessError):
                pass

    def test_an_accelerator_that_is_initialized(self):
        self.module("torch", "import sys, types\ncuda = types.ModuleType('torch.cuda')\n"
                    "cuda.is_initialized = lambda: True\nsys.modules['torch.cuda'] = cuda")
        self.assertIn("torch.cuda is initialized", self.start().prepare("torch")["why"])

    def test_an_accelerator_that_an_import_has_asked_for(self):
        self.module("torch", "import sys, types, os\ncuda = types.ModuleType('torch.cuda')\npid = os.getpid()\n"
                    "cuda._is_in_bad_fork = lambda: os.getpid() != pid\nsys.modules['torch.cuda'] = cuda")
        self.assertIn("torch.cuda cannot be used in a fork", self.start().prepare("torch")["why"])


if __name__ == "__main__":
    unittest.main()
