"""The parent and its forks: what makes it unsafe, what ends it, and what they do when something goes wrong."""

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

import help


class Case(unittest.TestCase):
    def setUp(self):
        help.adopt_orphans()
        self.dir = os.path.realpath(tempfile.mkdtemp(prefix="dlrover-warm-test-"))
        self.addCleanup(shutil.rmtree, self.dir)
        self.lib = os.path.join(self.dir, "lib")
        self.job = os.path.join(self.dir, "job")
        os.mkdir(self.lib)
        os.mkdir(self.job)
        self.err = open(os.path.join(self.dir, "err"), "w+")
        self.addCleanup(self.err.close)
        self.out = open(os.path.join(self.dir, "out"), "w+")
        self.addCleanup(self.out.close)

    def module(self, name, text):
        os.makedirs(os.path.dirname(os.path.join(self.lib, name)), exist_ok=True)
        with open(os.path.join(self.lib, name + ".py"), "w") as f:
            f.write(textwrap.dedent(text))

    def script(self, text):
        path = os.path.join(self.job, "script.py")
        with open(path, "w") as f:
            f.write(textwrap.dedent(text))
        return path

    def start(self, *options, **env):
        env = dict(os.environ, PYTHONPATH=self.lib, PYTHONDONTWRITEBYTECODE="1", **env)
        parent = help.Parent(*(options or ["-u"]), env=env, stderr=self.err)
        self.addCleanup(self.end, parent)
        return parent

    def end(self, parent):
        parent.process.kill()
        parent.process.wait()
        parent.wire.close()

    def errors(self):
        self.err.seek(0)
        return self.err.read()

    def run_in(self, parent, text, *argv, urgent=False, worker=None, **more):
        """What a fork prints that runs a script."""
        worker = worker or parent.fork(urgent)
        self.out.seek(0)
        self.out.truncate()
        answer = worker.run(self.script(text), *argv, stdout=self.out, stderr=self.err, **more)
        self.assertEqual((answer, worker.wait()), ({"op": "running"}, 0), self.errors())
        self.out.seek(0)
        return self.out.read()


class Parents(Case):
    def test_prepared(self):
        self.module("one", "")
        self.module("broken", "import not_there_either")
        self.module("leaves", "raise SystemExit(3)")
        parent = self.start()
        answer = parent.prepare("one", "broken", "leaves", "not_there", "json.tool", deny=["json"])
        self.assertEqual({k: answer[k] for k in ("op", "v", "pid", "threads")},
                         {"op": "prepared", "v": 1, "pid": parent.process.pid, "threads": 1})
        self.assertEqual([n for n, _ in answer["failed"]], ["broken", "leaves", "not_there"])
        self.assertIn([os.path.join(self.lib, "one.py"), os.stat(os.path.join(self.lib, "one.py")).st_mtime_ns, 0],
                      answer["files"])
        out = self.run_in(parent, "import sys; print('one' in sys.modules, 'json.tool' in sys.modules)")
        self.assertEqual(out, "True False\n")
        self.assertEqual(parent.close(), 0)

    def test_a_long_list_comes_in_a_file(self):
        parent = self.start()
        with help.memfd({"modules": ["not_there_%d" % n for n in range(9000)] + ["colorsys"]}) as f:
            help.send(parent.wire, {"op": "prepare", "launcher": os.getpid()}, f.fileno())
        self.assertEqual(parent.answer()["op"], "prepared")
        self.assertEqual(self.run_in(parent, "import sys; print('colorsys' in sys.modules)"), "True\n")

    def test_few_descriptors(self):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
        try:
            parent = self.start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        self.assertEqual(parent.prepare("colorsys")["op"], "prepared", self.errors())
        self.assertEqual(self.run_in(parent, "import os; print(os.readlink('/proc/self/fd/0'))"), "/dev/null\n")

    def test_unsafe(self):
        thread = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
        process = ("import ctypes, subprocess\n"
                   "subprocess.Popen(['sleep', '60'], preexec_fn=lambda: ctypes.CDLL(None).prctl(1, 9))")
        for text, why in ((thread, "threads"), (process, "a process")):
            self.module("one", text)
            answer = self.start().prepare("json", "one", "colorsys")
            self.assertEqual((answer["op"], answer["module"]), ("unsafe", "one"))
            self.assertIn("importing one started " + why, answer["why"])
            parent = self.start()
            self.assertEqual(parent.prepare("json", "one", deny=["one"])["op"], "prepared")
            answer = self.start().prepare("json", "one", standby=True)
            self.assertEqual(answer["op"], "prepared")

    def test_imports_that_do_harm(self):
        self.module("exits", "import os\nos._exit(0)")
        self.module("forks", "import os\nif os.fork():\n    os.wait()")
        self.module("changes", "import os, signal, sys\n"
                    "os.environ['OF_IMPORT'] = '1'\nos.environ.setdefault('GIVEN', 'x')\ndel os.environ['GONE']\n"
                    "os.chdir('/')\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
                    "print('said')\nsys.argv")
        parent = self.start(GONE="1")
        answer = parent.prepare("exits", "forks", "changes")
        self.assertEqual((answer["op"], [n for n, _ in answer["failed"]]), ("prepared", ["exits"]))
        env = dict(parent.env, GIVEN="mine")
        out = self.run_in(parent, """
            import os, signal
            print(*[os.environ.get(n) for n in ("OF_IMPORT", "GIVEN", "GONE")], os.getcwd())
            assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        """, env=env, cwd=self.dir)
        self.assertEqual(out.split(), ["1", "mine", "None", self.dir])

    def test_variables_for_imports(self):
        self.module("reads", "import os\nfound = os.environ.get('FOR_IMPORTS'), os.environ.get('LOCAL_RANK')")
        parent = self.start(FOR_IMPORTS="old", LOCAL_RANK="3")
        parent.prepare("reads", env={"FOR_IMPORTS": "new", "LOCAL_RANK": "0"})
        out = self.run_in(parent, "import reads, os\nprint(reads.found, os.environ['FOR_IMPORTS'])")
        self.assertEqual(out, "('new', '3') old\n")

    def test_imports_that_read_what_is_of_a_worker(self):
        """They are left to the workers."""
        self.module("of_a_rank", "import os\nrank = int(os.environ.setdefault('RANK', '0'))")
        self.module("of_a_mode", "import os\nmode = 'MODE' in os.environ")
        self.module("others", "import os\nothers = dict(os.environ), os.environ.get('PATH'), os.environ.get('OTHER')")
        for text, module, why in (
                ("import json, others, of_a_rank", "of_a_rank", "reads $RANK, of which each worker has its own"),
                ("import os\nos.environ['MODE'] = os.environ['HOME']\nimport others, of_a_mode", "of_a_mode",
                 "reads $MODE, which the script has set, and only running it tells how"),
                ("import os\nos.environ['MODE'] = os.environ['HOME']\nos.environ['MODE'] = 'x'\nimport of_a_mode",
                 "", ""),
                ("import os, of_a_mode\nos.environ['MODE'] = os.environ['HOME']\nimport others", "", ""),
                ("import os\nos.environ['PATH'] += ':/x'\nimport others", "", "")):
            for standby in False, True:
                with self.subTest(text=text, standby=standby):
                    answer = self.start().prepare(script=self.script(text), standby=standby)
                    self.assertEqual((answer["op"], answer.get("module", "")),
                                     ("unsafe" if why else "prepared", module))
                    self.assertIn(why, answer.get("why", ""))
        answer = self.start().prepare("json", "of_a_rank", deny=["of_a_rank"])
        self.assertEqual(answer["op"], "prepared")
        self.module("package/__init__", "")
        self.module("package/inner", "import of_a_rank")
        self.assertEqual(self.start().prepare("package", "package.inner")["module"], "package")

    def test_a_variable_that_an_import_sets_to_what_it_is(self):
        """The parent sets it for its imports, but that of a fresh worker sets it for good."""
        name = "PYTORCH_NVML_BASED_CUDA_CHECK"
        self.module("sets", "import os\nos.environ['%s'] = '1'" % name)
        self.module("defaults", "import os\nos.environ.setdefault('%s', '1')" % name)
        for module, found in ("sets", "1"), ("defaults", "1"), ("json", "None"):
            parent = self.start()
            parent.prepare(module)
            self.assertEqual(self.run_in(parent, "import os; print(os.environ.get('%s'))" % name), found + "\n")

    def test_variables_that_a_script_sets(self):
        """As it sets them, one import after the other. If only running it tells how, then the first workers run it."""
        for name in "abcdefg":
            self.module("read_" + name, "import os\nv = os.environ.get('OMP_X'), os.environ.get('Y')")
        reads = "def show(): print(*[sys.modules[n].v for n in sorted(sys.modules) if n.startswith('read_')])\n"
        for text, out in (
                ("import read_a\nos.environ['OMP_X'] = '1'\nimport read_b\nos.environ.setdefault('OMP_X', '2')\n"
                 "import read_c\nos.environ.pop('OMP_X')\nif 'OMP_X' not in os.environ:\n    os.environ['OMP_X'] = '3'\n"
                 "import read_d\nfrom os import environ\nenviron.update({'OMP_X': '4'}, Y='y')\nimport read_e\n"
                 "del os.environ['OMP_X']\ntry:\n    import read_f\nexcept ImportError: pass\n"
                 "os.environ['OMP_X'] = str(5)\nimport json",
                 "(None, None) ('1', None) ('1', None) ('3', None) ('4', 'y') (None, 'y')"),
                ("os.environ['Z'] = str(1)\nimport read_a", None),
                ("os.environ['OMP_X'] = str(1)\nimport read_a", "$OMP_X"),
                ("if sys.argv: os.environ['OMP_X'] = '1'\nimport read_a", "$OMP_X"),
                ("for v in 'OMP_X': os.environ[v] = '1'\nimport read_a", "variables"),
                ("def f(): os.environ['OMP_X'] = '1'\nf()\nimport read_a", "$OMP_X"),
                ("def f(): os.environ['OMP_X'] = '1'\nimport read_a\nf()", None),
                ("try:\n    from dotenv import load_dotenv\n    load_dotenv()\nexcept ImportError: pass\nimport read_a",
                 "variables")):
            text = "import os, sys\n" + reads + text + "\nshow()\n"
            parent = self.start()
            answer = parent.prepare(script=self.script(text), at_import=["PYTHON", "OMP_"], later=["OMP_LATER"])
            if answer["op"] == "unsafe":
                self.assertIn("the script sets %s before it imports " % out, answer["why"])
                self.assertTrue(answer["first"])
                continue
            forked = self.run_in(parent, text)
            self.assertEqual(forked, subprocess.run([sys.executable, self.script(text)], env=parent.env, check=True,
                                                    stdout=subprocess.PIPE).stdout.decode())
            self.assertIn(out or "", forked)

    def test_places_that_a_script_adds(self):
        """A module there that has the name of another one is not imported too early."""
        self.module("twin", "raise SystemExit('the other one')")
        self.module("single", "")
        os.mkdir(os.path.join(self.dir, "src"))
        with open(os.path.join(self.dir, "src", "twin.py"), "w") as f:
            f.write("import colorsys")
        for place, names in (("os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'src')", {"colorsys", "single"}),
                             ("str(Path(__file__).resolve().parent.parent / 'src')", {"colorsys", "single"}),
                             ("'/'.join(__file__.split('/')[:-2] + ['src'])", {"wave"})):
            text = "import sys, os\nfrom pathlib import Path\nROOT = %s\nsys.path.insert(0, ROOT)\n" % place
            parent = self.start()
            text += "import twin, single, wave\nprint(twin.__file__)"
            answer = parent.prepare(script=self.script(text))
            self.assertEqual((answer["op"], answer["failed"]), ("prepared", []))
            self.assertEqual(names - set(answer["names"]), set())
            self.assertNotIn("twin", answer["names"])
            self.assertIn("src/twin.py", self.run_in(parent, text))

    def test_what_a_script_imports(self):
        for name, text in {"train.py": "import own, wave, json.tool as t\nfrom colorsys import rgb_to_hsv\n"
                                       "from xml import dom, not_there\nfrom pack.sub import x\nimport not_there\n"
                                       "try:\n    import calendar\nexcept ImportError: pass\n"
                                       "def f():\n    import mailbox\n",
                           "own.py": "raise SystemExit\nimport bisect\nimport own",
                           "bisect.py": "import this_is_not_imported",
                           "pack/__init__.py": "import cmd",
                           "pack/__main__.py": "from .sub import x\nfrom . import other",
                           "pack/sub.py": "import csv", "pack/other.py": "import plistlib",
                           "bad.py": "import ("}.items():
            os.makedirs(os.path.dirname(os.path.join(self.job, name)), exist_ok=True)
            with open(os.path.join(self.job, name), "w") as f:
                f.write(text)
        for script, module, yes, no in (
                ("train.py", False, {"wave", "json.tool", "colorsys", "xml.dom", "calendar", "cmd", "csv"},
                 {"own", "plistlib", "mailbox"}),
                (os.path.join(self.job, "train.py"), False, {"wave", "csv"}, {"own"}),
                ("pack", True, {"cmd", "csv", "plistlib"}, {"wave", "pack"}),
                ("pack.sub", True, {"csv"}, {"wave", "plistlib"}),
                ("not_there", True, set(), {"wave"}), ("bad.py", False, set(), {"wave"})):
            parent = help.Parent("-u", env=dict(os.environ, PYTHONPATH="", PYTHONDONTWRITEBYTECODE="1"), cwd=self.job)
            self.addCleanup(self.end, parent)
            answer = parent.prepare(script=script, module=module)
            self.assertEqual(answer["op"], "prepared")
            files = [p for p, _, _ in answer["files"]]
            names = {os.path.basename(p).partition(".")[0] for p in files} | {
                "%s.%s" % (os.path.basename(os.path.dirname(p)), os.path.basename(p).partition(".")[0]) for p in files}
            names |= {n.replace(".__init__", "") for n in names} | ({"xml.dom"} if "dom.__init__" in names else set())
            self.assertEqual((yes - names, no & names), (set(), set()))
            self.assertFalse([p for p in files if p.startswith(self.job)])

    def test_an_import_that_hangs(self):
        """It ends with its launcher's interest."""
        self.module("hangs", "import time\ntime.sleep(1000)")
        parent = self.start()
        help.send(parent.wire, {"op": "prepare", "modules": ["hangs"]})
        time.sleep(0.3)
        self.assertIsNone(parent.process.poll())
        parent.process.terminate()
        self.assertEqual(parent.process.wait(help.WAIT), -signal.SIGTERM)

    def test_ends_with_the_connection(self):
        for when in ("before", "after"):
            parent = self.start()
            if when == "after":
                parent.prepare("json")
            self.assertEqual(parent.close(), 0)
        parent = self.start()
        help.send(parent.wire, {"op": "quit"})
        self.assertEqual(parent.process.wait(help.WAIT), 0)
        self.assertEqual(self.errors(), "")

    def test_nonsense(self):
        parent = self.start()
        parent.wire.send(b"{")
        self.assertEqual(parent.process.wait(help.WAIT), 3)
        self.assertIn("JSONDecodeError", self.errors())

    def test_a_sitecustomize_that_is_not_ours(self):
        self.module("sitecustomize", "")
        for options, env in ((["-I"], {}), (["-S"], {}), (["-E"], {})):
            parent = self.start(*options, **env)
            self.assertEqual(parent.process.wait(help.WAIT), 1)
        self.assertEqual(self.errors().count("warm: sitecustomize does not run"), 3)

    def test_one_by_the_user(self):
        self.module("sitecustomize", "import sys; sys.of_user = 1")
        parent = self.start()
        parent.prepare("json")
        self.assertEqual(self.run_in(parent, "import sys; print(sys.of_user)"), "1\n")

    def test_interrupts_are_for_the_job(self):
        parent = self.start()
        parent.prepare("json")
        worker = parent.fork()
        os.kill(worker.pid, signal.SIGINT)
        os.kill(parent.process.pid, signal.SIGINT)
        answer = worker.run(self.script("import signal\nprint(signal.pthread_sigmask(0, []), signal.sigpending())"))
        self.assertEqual((answer, worker.wait()), ({"op": "running"}, 0))
        self.assertEqual(parent.close(), 0)


class Forks(Case):
    def test_many(self):
        for urgent in False, True:
            self.many(urgent)

    def test_a_trial_fails_that_forks_do_not_wait_for(self):
        over = os.path.join(self.dir, "over")
        self.module("torch", "import os, time\ndef ones(*a, **k):\n    while not os.path.exists(%r):\n"
                    "        time.sleep(0.01)\n    raise OSError('broken')" % over)
        parent = self.start()
        self.assertEqual(parent.prepare("torch", urgent=True), {"op": "imported"})
        workers = [help.Worker(parent, w) for w in [parent.asked(True) for _ in range(8)]]
        self.assertEqual([w.parked["op"] for w in workers], ["parked"] * 8)
        open(over, "w").close()
        self.assertEqual(parent.answer()["op"], "unsafe")
        for w in workers:
            w.wire.close()
        self.assertEqual([w.wait() for w in workers], [0] * 8)
        self.assertEqual(parent.close(), 0)

    def many(self, urgent):
        parent = self.start()
        parent.prepare("random")
        wires = [parent.asked(urgent) for _ in range(8)]
        help.send(parent.wire, {"op": "prepare", "modules": ["json"], "launcher": os.getpid()})
        workers = [help.Worker(parent, w) for w in wires]
        self.assertEqual(parent.answer()["op"], "prepared")
        files = [open(os.path.join(self.dir, "o%d" % n), "w+") for n in range(8)]
        script = self.script("import os, random\nprint(os.environ['RANK'], os.getpid(), random.random())")
        for n, w in enumerate(workers):
            w.run(script, env=dict(parent.env, RANK=str(n)), stdout=files[n])
        self.assertEqual([w.wait() for w in workers], [0] * 8)
        lines = []
        for f in files:
            f.seek(0)
            lines.append(f.read().split())
            f.close()
        self.assertEqual([l[:2] for l in lines], [[str(n), str(w.pid)] for n, w in enumerate(workers)])
        self.assertEqual(len({l[2] for l in lines}), 8)

    def test_parked_ones_end_with_the_connection(self):
        parent = self.start()
        parent.prepare("json")
        worker = parent.fork()
        worker.wire.close()
        self.assertEqual(worker.wait(), 0)
        worker = parent.fork()
        help.send(worker.wire, {"op": "quit"})
        self.assertEqual(worker.wait(), 0)

    def test_forks_outlive_the_parent(self):
        parent = self.start()
        parent.prepare("json")
        workers = [parent.fork() for _ in range(2)]
        parent.process.kill()
        parent.process.wait()
        answers = [w.run(self.script("import os; print(os.getppid())")) for w in workers]
        self.assertEqual((answers, [w.wait() for w in workers]), ([{"op": "running"}] * 2, [0, 0]))

    def test_killed_at_each_moment(self):
        """A child that is killed is no child any more, and nobody else is hurt."""
        parent = self.start()
        parent.prepare("json")
        for delay in (0, 0.001, 0.003, 0.005, 0.01, 0.02):
            worker = parent.fork()
            if delay:
                script = self.script("import time; time.sleep(1000)")
                job = dict(argv=[sys.executable, "-u", script], env=[], cwd=None, cpus=None)
                with help.memfd(job) as f, open(os.devnull, "r+") as n:
                    help.send(worker.wire, {"op": "run"}, f.fileno(), n.fileno(), n.fileno(), n.fileno())
                time.sleep(delay)
            os.kill(worker.pid, signal.SIGKILL)
            self.assertEqual(worker.wait(), -9)
            worker.wire.close()
        self.assertEqual(self.run_in(parent, "print(1)"), "1\n")

    def test_memory_policy(self):
        call = {"x86_64": 238, "aarch64": 237}.get(os.uname().machine)
        if call is None or ctypes.CDLL(None).syscall(call, 0, None, 0):
            self.skipTest("this process may not set its memory policy")
        parent = self.start()
        parent.prepare("json")
        policy = dict(call=call, mode=2, nodes=[1] + [0] * 15)
        script = "print(open('/proc/self/numa_maps').readline().split()[1])"
        self.assertEqual(self.run_in(parent, script, memory=policy), "bind:0\n")
        self.assertNotIn("bind", self.run_in(parent, script))
        self.assertEqual(parent.fork().run(self.script(""), memory=dict(policy, nodes=[0] * 16))["op"], "refused")

    def test_the_parent_is_killed_while_it_forks(self):
        for delay in (0, 0.001, 0.002, 0.004, 0.008):
            parent = self.start()
            parent.prepare("json")
            ours, theirs = help.pair()
            help.send(parent.wire, {"op": "fork"}, theirs.fileno())
            theirs.close()
            time.sleep(delay)
            parent.process.kill()
            parent.process.wait()
            message = help.receive(ours)  # it is there, or it is not: this does not wait for ever
            if message is not None:
                worker = help.Worker(parent, ours, message["pid"])
                self.assertEqual((worker.run(self.script("")), worker.wait()), ({"op": "running"}, 0))
            ours.close()
        while True:  # forks that did not come to say that they are there
            try:
                os.wait()
            except ChildProcessError:
                break

    def test_refused(self):
        parent = self.start()
        parent.prepare("json", "colorsys")
        good = self.script("print(1)")
        with open(os.path.join(self.job, "colorsys.py"), "w"):
            pass
        for argv, why, more in (
                (["not_there.py"], "No such file", {}),
                (["-"], "standard input", {}),
                (["-i", good], "option -i", {}),
                (["-O", good], "other options", {}),
                ([good], "hides the module", {}),
                (["-c", "print(1)"], "No such file", {"cwd": "/nowhere"}),
                (["-c", "print(1)"], "the interpreter is", {"argv": ["/bin/python", "-u", "-c", ""]}),
                (["-c", "print(1)"], "argv", {"argv": None})):
            worker = parent.fork()
            answer = worker.run(*argv, **more)
            self.assertEqual((answer["op"], worker.wait()), ("refused", 0))
            if why != "argv":
                self.assertIn(why, answer["why"])

    def test_standby(self):
        parent = self.start()
        self.assertEqual(parent.prepare("json", standby=True)["op"], "prepared")
        worker = help.Worker(parent, parent.wire, parent.process.pid)
        script = self.script("import sys, os\nprint(sys.argv[1:], os.getpid(), sys._getframe().f_back)")
        answer = worker.run(script, "a", stdout=self.out)
        self.assertEqual((answer, parent.process.wait(help.WAIT)), ({"op": "running"}, 0))
        self.out.seek(0)
        self.assertEqual(self.out.read(), "['a'] %d None\n" % parent.process.pid)

    def test_all_end_with_the_launcher(self):
        launcher = """
            import sys, os, time
            sys.path.insert(0, %r)
            import help
            help.adopt_orphans()
            parent = help.Parent("-u")
            parent.prepare("json")
            parked, running = parent.fork(), parent.fork()
            running.run("-c", "import time; time.sleep(1000)")
            print(parent.process.pid, parked.pid, running.pid, flush=True)
            time.sleep(1000)
        """ % help.HERE
        with subprocess.Popen([sys.executable, self.script(launcher)], stdout=subprocess.PIPE) as p:
            pids = list(map(int, p.stdout.readline().split()))
            self.assertEqual(len(pids), 3)
            p.kill()
        ends = {pid: os.waitpid(pid, 0)[1] for pid in pids}  # they are ours now
        self.assertEqual(ends[pids[2]], signal.SIGKILL)

    def test_what_proc_shows_where_it_cannot_be_moved(self):
        """The new words are cut off where the old ones ended."""
        parent = self.start("-u", PADDING="x" * 300)
        parent.prepare("json")
        out = self.run_in(parent, """
            import ctypes, os, sys
            sys.path.insert(0, %r)
            from _dlrover_warm import proctitle
            def fail(*args): raise OSError
            proctitle._move = fail
            proctitle.show([b"python", b"short"], [b"A=1", b"RANK=4"])
            words, env = (open("/proc/self/" + n).read().split("\\0") for n in ("cmdline", "environ"))
            getenv = ctypes.CDLL(None).getenv
            getenv.restype = ctypes.c_char_p
            print(words[:2], [e for e in env if e], getenv(b"PADDING")[:3], getenv(b"A"))
        """ % help.TREE)
        self.assertEqual(out, "['python', 'short'] ['A=1', 'RANK=4'] b'xxx' None\n")

    def test_no_descriptor_is_left(self):
        """Those that an import has opened are kept: a fresh process would have them, too."""
        self.module("opens", "import os\nfd = os.open('/dev/zero', os.O_RDONLY)")
        parent = self.start()
        parent.prepare("opens")
        self.run_in(parent, "")
        out = self.run_in(parent, """
            import opens, os
            fds = {}
            for fd in os.listdir("/proc/self/fd"):
                try:
                    fds[int(fd)] = os.readlink("/proc/self/fd/" + fd)
                except OSError:
                    pass
            print(fds.pop(opens.fd), sorted(fd for fd in fds if "/libffi" not in fds[fd]))
        """)
        self.assertEqual(out, "/dev/zero [0, 1, 2]\n")


class Learned(Case):
    """What the workers tell of their imports."""

    def learn(self, text, seconds=None, cwd=None, **env):
        path = os.path.join(self.dir, "learned")
        env = dict(os.environ, PYTHONPATH=os.pathsep.join([help.PATH, self.lib]), DLROVER_WARM=path,
                   PYTHONDONTWRITEBYTECODE="1", **env)
        p = subprocess.run([sys.executable, "-u", self.script(text)], env=env, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, cwd=cwd or self.job, timeout=help.WAIT)
        self.assertEqual((p.returncode, p.stderr.decode()), (0, ""))
        with open(path) as f:
            return json.load(f)

    def fake_torch(self):
        os.makedirs(os.path.join(self.lib, "torch", "optim"))
        for name in ("torch/__init__.py", "torch/optim/__init__.py"):
            open(os.path.join(self.lib, name), "w").close()
        self.module("torch/optim/optimizer", """
            class Optimizer:
                def _optimizer_step_code(self): self.counted = getattr(self, "counted", 0) + 1
                def step(self): self._optimizer_step_code()
        """)

    def test_the_first_step(self):
        self.fake_torch()
        self.module("mine", "")
        with open(os.path.join(self.job, "own.py"), "w") as f:
            f.write("import os\nos.environ['SET'] = '1'")
        learned = self.learn("""
            import gc, os, sys, own, mine, wave
            from torch.optim.optimizer import Optimizer
            before = Optimizer._optimizer_step_code
            path = os.path.join(os.path.dirname(os.path.dirname(__file__)), "learned")
            assert "DLROVER_WARM" not in os.environ and not os.path.exists(path)
            o = Optimizer()
            o.step()
            written = os.stat(path).st_mtime_ns
            assert Optimizer._optimizer_step_code is not before and not gc.callbacks, gc.callbacks
            for _ in range(3):
                o.step()
            assert o.counted == 4 and os.stat(path).st_mtime_ns == written
            assert not any("learn" in repr(f) for f in sys.meta_path)
            import calendar
        """, cwd="/usr")
        self.assertEqual((learned["v"], learned["why"], learned["env"]), (1, "step", {"SET": "1"}))
        names = learned["modules"]
        self.assertLess(names.index("wave"), names.index("torch"))
        self.assertNotIn("calendar", names)
        self.assertEqual({"torch.optim.optimizer", "wave", "os"} - set(names), set())
        self.assertEqual(set(names) & {"own", "__main__", "sitecustomize", "_dlrover_warm"}, set())

    def test_the_time(self):
        learned = self.learn("""
            import _dlrover_warm.learn as l, gc
            assert len(gc.callbacks) == 1
            gc.collect()
            assert len(gc.callbacks) == 1
            l._LATEST = -1
            gc.collect()
            assert not gc.callbacks
            import calendar
        """)
        self.assertEqual((learned["why"], "calendar" in learned["modules"]), ("time", False))

    def test_the_exit(self):
        learned = self.learn("""
            import os, subprocess, sys, multiprocessing, calendar
            if os.fork() == 0: sys.exit()
            os.wait()
            subprocess.check_call([sys.executable, "-c", "import wave"])
        """)
        self.assertEqual((learned["why"], "calendar" in learned["modules"], "wave" in learned["modules"]),
                         ("exit", True, False))

    def test_in_a_fork(self):
        self.fake_torch()
        parent = self.start()
        parent.prepare("torch.optim.optimizer", "colorsys")
        path = os.path.join(self.dir, "learned")
        self.run_in(parent, "import sys, wave\nfrom torch.optim.optimizer import Optimizer\nOptimizer().step()",
                    env=dict(parent.env, DLROVER_WARM=path))
        with open(path) as f:
            learned = json.load(f)
        self.assertEqual((learned["why"], "wave" in learned["modules"]), ("step", True))
        self.assertEqual({"colorsys", "torch.optim.optimizer"} & set(learned["modules"]), set())  # the parent's


if __name__ == "__main__":
    unittest.main()
