"""A worker that is forked does what one does that is started: the same scripts are run both ways."""

import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest
import zipfile

import help

MODULES = ["json", "random", "logging", "multiprocessing", "threading", "inspect", "pickle", "warnings", "traceback",
           "asyncio", "concurrent.futures", "unittest", "ctypes", "dataclasses", "argparse", "subprocess"]


def without_addresses(text):
    """Nor with what faulthandler shows of C functions since 3.14: that has ctypes below the script."""
    lines = text.decode().splitlines(True)
    shown = [s for s in lines if not s.startswith(("  Binary file ", "  <truncated rest of calls>"))]
    return re.sub("0x[0-9a-f]{8,}", "0x...", "".join(shown))


class Both(unittest.TestCase):
    """Each test writes files, and compares what becomes of a command line."""

    maxDiff = None
    options = ["-u"]
    variables = {}

    @classmethod
    def setUpClass(cls):
        help.adopt_orphans()
        cls.env = {k: v for k, v in os.environ.items() if not k.startswith("DLROVER_")}
        cls.env.update(cls.variables, PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=help.PATH)
        cls.parent = help.Parent(*cls.options, env=dict(cls.env, PYTHONPATH=""))
        answer = cls.parent.prepare(*MODULES)
        assert answer["op"] == "prepared" and not answer["failed"], answer

    @classmethod
    def tearDownClass(cls):
        assert cls.parent.close() == 0

    def setUp(self):
        self.dir = os.path.realpath(tempfile.mkdtemp(prefix="dlrover-warm-test-"))
        self.addCleanup(shutil.rmtree, self.dir)

    def write(self, name, text):
        path = os.path.join(self.dir, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as f:
            f.write(textwrap.dedent(text))
        return path

    def started(self, argv, stdin, env):
        with open(os.path.join(self.dir, "in"), "w+") as i:
            i.write(stdin)
            i.seek(0)
            p = subprocess.run([sys.executable] + self.options + argv, stdin=i, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, env=env, cwd=self.dir, timeout=help.WAIT,
                               start_new_session=True)
        return p.returncode, without_addresses(p.stdout), without_addresses(p.stderr)

    def forked(self, argv, stdin, env):
        """As started(). The streams are pipes, too."""
        worker = self.parent.fork()
        with open(os.path.join(self.dir, "in"), "w+") as i:
            i.write(stdin)
            i.seek(0)
            cats = [subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
            answer = worker.run(*argv, stdin=i, stdout=cats[0].stdin, stderr=cats[1].stdin, env=env, cwd=self.dir)
            self.assertEqual(answer, {"op": "running"})
            texts = []
            code = worker.wait()
            for cat in cats:
                cat.stdin.close()
                texts.append(without_addresses(cat.stdout.read()))
                cat.stdout.close()
                cat.wait()
        return (code, *texts)

    def same(self, *argv, stdin="", **variables):
        """Runs a command line both ways, and returns the code, the output and the errors."""
        env = dict(self.env, **variables)
        fresh = self.started(list(argv), stdin, env)
        forked = self.forked(list(argv), stdin, env)
        if forked != fresh:
            lines = [("code %d\n%s\n%s" % f).splitlines() for f in (fresh, forked)]
            self.fail("\n".join(difflib.unified_diff(*lines, "started", "forked", n=0, lineterm="")))
        return fresh

    def same_script(self, text, *args, code=0, **more):
        rc, out, err = self.same(self.write("script.py", text), *args, **more)
        self.assertEqual(rc, code, out + err)
        return out, err


IDENTITY = """
    import sys, os, time, signal, resource, threading, locale, warnings, gc
    def show(*names):
        for n in names:
            print(n, eval(n))
    show("sys.argv", "sys.path", "sys.flags", "sys.warnoptions", "sys._xoptions", "sys.executable", "sys.prefix",
         "getattr(sys, 'orig_argv', 0)", "sys.dont_write_bytecode", "sys.getrecursionlimit()", "sys.excepthook",
         "sys.displayhook", "sys.getswitchinterval()", "sys.gettrace(), sys.getprofile()",
         "[type(p) for p in sys.meta_path]",
         "len(sys.path_hooks)", "hasattr(sys, 'ps1')", "sys.getfilesystemencoding()")
    show("sorted(globals())", "__name__", "__spec__", "type(__loader__)", "__package__", "__builtins__", "__doc__",
         "globals().get('__file__')", "globals().get('__cached__')", "globals().get('__annotations__')",
         "sys.modules['__main__'].__dict__ is globals()")
    print(sys._getframe().f_back and sys._getframe().f_back.f_code.co_name)
    show("warnings.filters",
         "gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.callbacks")
    show("os.getcwd()", "oct(os.umask(0o22))", "os.sched_getaffinity(0)", "os.getpriority(os.PRIO_PROCESS, 0)",
         "os.sched_getscheduler(0)", "os.getsid(0) == os.getpid() == os.getpgid(0)", "os.getppid() > 1")
    for n in dir(resource):
        if n.startswith("RLIMIT_"):
            print(n, resource.getrlimit(getattr(resource, n)))
    for n in range(1, 65):
        if n not in (32, 33):
            print(n, signal.getsignal(n))
    print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.sigpending())
    for line in open("/proc/self/status"):
        if line.startswith(("SigB", "SigI", "SigC", "SigP", "Shd", "Threads", "Umask", "Name", "NoNew", "Cpus_al")):
            print(line.strip())
    print(sorted(os.environ.items()))
    print(sorted(open("/proc/self/environ").read().split("\\0")))
    print(open("/proc/self/cmdline").read().split("\\0"), open("/proc/self/comm").read())
    links = {fd: os.path.realpath("/proc/self/fd/" + fd) for fd in sorted(os.listdir("/proc/self/fd"))
        if os.path.exists("/proc/self/fd/" + fd)}
    print([fd for fd in links if "/libffi" not in links[fd]])
    print(time.tzname, time.strftime("%Z", time.gmtime(0)), locale.getlocale(), locale.getpreferredencoding())
    t = threading.main_thread()
    print(t.name, t.ident == threading.get_ident(), t.native_id == threading.get_native_id() == os.getpid())
    print(threading.enumerate() == [t])
    for s in (sys.stdin, sys.stdout, sys.stderr):
        raw = getattr(s.buffer, "raw", s.buffer)
        print(type(s), s.encoding, s.errors, s.line_buffering, s.write_through, s.mode, s.name, s.newlines, s.fileno(),
              s.closed, type(s.buffer), s.buffer.name, raw.mode, raw.closefd, raw.name)
        print(s.seekable(), s.isatty(), s.readable(), s.writable())
    print(sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__, repr(sys.stdout))
    print(repr(sys.stdin.read()))
    import multiprocessing
    print(multiprocessing.current_process(), multiprocessing.parent_process(), multiprocessing.active_children())
"""


class Forms(Both):
    def test_a_script(self):
        out, _ = self.same_script(IDENTITY, "a", "", "-c", "ä b", stdin="line\r\nline", TZ="Asia/Tokyo", RANK="7")
        self.assertIn("('JST', ", out)

    def test_a_relative_name(self):
        self.write("sub/script.py", IDENTITY)
        for name in ("sub/script.py", "./sub/script.py", "sub/../sub/script.py", ".//sub/script.py"):
            self.assertEqual(self.same(name)[0], 0)

    def test_a_link_to_a_script(self):
        self.write("sub/script.py", IDENTITY + "    import beside; raise KeyError\n")
        self.write("sub/beside.py", "print('beside')")
        os.symlink("sub/script.py", os.path.join(self.dir, "link.py"))
        os.symlink("sub", os.path.join(self.dir, "dir"))
        for name in ("link.py", "dir/script.py", self.dir + "/link.py"):
            code, out, _ = self.same(name, "x")
            self.assertEqual(code, 1)
            self.assertIn("\nbeside\n", out)

    def test_modules(self):
        self.write("mod.py", IDENTITY + "    raise KeyError\n")
        self.write("pack/__init__.py", "print('init', __name__)")
        self.write("pack/__main__.py", "from . import sub" + IDENTITY.replace("\n    ", "\n") + "\nsub.f()")
        self.write("pack/sub.py", "def f():\n    raise KeyError\nif __name__ == '__main__': f()")
        for name in ("mod", "pack", "pack.sub"):
            self.assertEqual(self.same("-m", name, "a", "-x")[0], 1)
        self.assertEqual(self.same("-mmod", "a")[0], 1)
        for name in ("not_there", "pack.not_there", "not_there.x", "pack.sub.x"):
            self.assertEqual(self.same("-m", name)[0], 1)
        self.assertEqual(self.same("-m", "json.tool", stdin="[1]")[0], 0)

    def test_directories_and_archives(self):
        main = self.write("dir/__main__.py", IDENTITY + "    import beside; beside.f()\n")
        beside = self.write("dir/beside.py", "def f():\n    raise KeyError\n")
        with zipfile.ZipFile(os.path.join(self.dir, "z.pyz"), "w") as z:
            z.write(main, "__main__.py")
            z.write(beside, "beside.py")
        os.mkdir(os.path.join(self.dir, "empty"))
        for name in ("dir", "./dir", "dir/", self.dir + "/dir", "z.pyz", self.dir + "/z.pyz", "empty"):
            self.assertEqual(self.same(name, "a")[0], 1)

    def test_code(self):
        code = textwrap.dedent(IDENTITY)
        self.assertEqual(self.same("-c", code, "a", "-b")[0], 0)
        self.assertEqual(self.same("-c" + code)[0], 0)
        self.assertEqual(self.same("-c", "def f():\n    1/0\nf()")[0], 1)
        self.assertEqual(self.same("-c", "import sys; sys.exit(4)")[0], 4)
        self.assertEqual(self.same("-c", "# -*- coding: latin-1 -*-\nprint(ascii('ä'))")[0], 0)

    def test_compiled_and_encoded(self):
        path = self.write("script.py", IDENTITY + "    1/0")
        import py_compile

        py_compile.compile(path, os.path.join(self.dir, "script.pyc"), doraise=True)
        self.assertEqual(self.same("script.pyc")[0], 1)
        with open(path, "wb") as f:
            f.write("# -*- coding: latin-1 -*-\nprint(ascii('ä'))\nraise KeyError('ä')".encode("latin-1"))
        self.assertEqual(self.same("script.py")[0], 1)
        with open(path, "wb") as f:
            f.write(b"\xef\xbb\xbfprint(1)\r\nprint(2)\r\n1/0")
        self.assertEqual(self.same("script.py")[0], 1)

    def test_errors_of_syntax(self):
        for text in ("def f(:\n", "x = 1\n  y = 2", "'abc", "return 1", "\tx\n        y"):
            self.same_script(text, code=1)

    def test_future(self):
        self.same_script("""
            from __future__ import annotations
            import __future__
            def f(x: not_there): pass
            print(f.__annotations__, exec("def g(x: nor_this): pass\\nprint(g.__annotations__)"))
        """)
        self.same_script("def f(x: not_there): pass\nprint(f.__annotations__)", code=1)


class Ends(Both):
    def test_exits(self):
        for value, code in (("", 0), ("0", 0), ("7", 7), ("256", 0), ("-1", 255), ("None", 0),
                            ("'a\\nb'", 1), ("(1, 2)", 1), ("[]", 1), ("True", 1), ("2.5", 1)):
            self.same_script("import sys\nprint(1)\nsys.exit(%s)" % value, code=code)
        self.same_script("raise SystemExit", code=0)
        self.same_script("import os; print(1); os._exit(9)", code=9)
        self.same_script("import os; os.abort()", code=-6)
        self.same_script("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", code=-15)
        self.same_script("exit(3)", code=3)

    def test_exceptions(self):
        self.same_script("""
            import functools
            def f(n):
                if n: f(n - 1)
                else: raise ValueError("text\\nof it")
            try:
                f(3)
            except ValueError as e:
                raise RuntimeError("outer") from e
        """, code=1)
        self.same_script("def f(): return f()\ntry: f()\nexcept RecursionError as e: print(repr(e))")
        self.same_script("raise KeyboardInterrupt", code=-2)
        self.same_script("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)", code=-2)
        self.same_script("import sys\nsys.excepthook = lambda *a: print('hook', a[0])\n1/0", code=1)
        self.same_script("import sys\nsys.excepthook = lambda *a: 1/0\n{}[1]", code=1)
        self.same_script("import sys\nsys.excepthook = lambda *a: sys.exit(5)\n{}[1]", code=5)
        self.same_script("raise BaseException('x')", code=1)
        self.same_script("import traceback\ndef f(): traceback.print_stack()\nf()")
        self.same_script("import inspect\ndef f(): print(len(inspect.stack()))\nf()")
        self.same_script("import warnings\ndef f(): warnings.warn('w', stacklevel=5)\nf()\nwarnings.warn('v')")
        self.same_script("import logging\nlogging.warning('w', stack_info=True)\nlogging.getLogger('x').error('e')")
        self.same_script("import faulthandler, sys\nfaulthandler.dump_traceback(file=sys.__stdout__)")

    def test_in_a_module(self):
        self.write("mod.py", "import sys\n{'exit': sys.exit, 'key': lambda n: {}[n]}[sys.argv[1]](7)")
        self.write("interrupted.py", "raise KeyboardInterrupt")
        self.assertEqual([self.same("-m", "mod", w)[0] for w in ("exit", "key")], [7, 1])
        self.same("-m", "interrupted")

    def test_what_runs_at_exit(self):
        self.same_script("""
            import atexit, threading, time, weakref, sys, os
            class C:
                def __del__(self): print("deleted")
            c, d = C(), C()
            d.cycle = d
            weakref.finalize(c, print, "finalized")
            atexit.register(print, "first registered")
            atexit.register(print, "last registered")
            def late():
                time.sleep(0.1)
                print("thread")
            threading.Thread(target=late).start()
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
            print("no newline", end="")
            sys.stderr.write("err")
        """)
        self.same_script("import atexit\natexit.register(lambda: 1/0)\nprint(1)")
        self.same_script("import threading\nthreading.Thread(target=lambda: 1/0, name='T').start()")
        self.same_script("import sys, os\nos.close(1)\nprint('x')", code=1)
        self.same_script("from concurrent.futures import *\n"
                         "with ThreadPoolExecutor(2) as p: print(list(p.map(abs, [-1])))\n"
                         "q = ThreadPoolExecutor(); print(q.submit(abs, -2).result())")

    def test_signals(self):
        self.same_script("""
            import signal, os, sys
            signal.signal(signal.SIGTERM, lambda s, f: sys.exit(17))
            signal.signal(signal.SIGALRM, lambda s, f: os.kill(os.getpid(), signal.SIGTERM))
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            signal.pause()
            signal.pause()
        """, code=17)


class Libraries(Both):
    def test_multiprocessing(self):
        for how in ("fork", "spawn", "forkserver"):
            self.same_script("""
                import multiprocessing as mp, sys
                class C:
                    def __init__(self, x): self.x = x
                def f(c, q):
                    q.put((c.x, __name__, mp.parent_process().name, mp.current_process().name, sys.argv))
                def bad(): raise KeyError("in the child")
                if __name__ == "__main__":
                    ctx = mp.get_context(sys.argv[1])
                    q = ctx.Queue()
                    p = ctx.Process(target=f, args=(C(5), q))
                    p.start()
                    print(q.get())
                    p.join()
                    with ctx.Pool(2) as pool:
                        print(pool.map(abs, range(-3, 0)), [c.x for c in pool.map(C, [1])])
                    p = ctx.Process(target=bad)
                    p.start(); p.join()
                    print(p.exitcode)
                    lock = ctx.Lock()
                    with ctx.Manager() as m:
                        print(m.dict(a=1))
            """, how)

    def test_pickles(self):
        out, _ = self.same_script("""
            import pickle, sys
            class C: pass
            def f(): pass
            print(pickle.dumps([C, f, C()]), pickle.loads(pickle.dumps(C)) is C, C.__module__, f.__module__)
        """)
        self.assertIn("__main__", out)

    def test_sources(self):
        self.same_script("""
            import inspect, linecache, __main__
            class C:
                x = 1
            def f():
                return 2
            print(inspect.getsource(C), inspect.getsource(f), inspect.getsourcefile(f))
            print(inspect.getmodule(f) is __main__)
            print(inspect.getfile(__main__), linecache.getline(__file__, 2))
        """)

    def test_dataclasses_and_annotations(self):
        self.same_script("""
            from __future__ import annotations
            import dataclasses, typing
            @dataclasses.dataclass
            class D:
                x: int = 1
                y: "D" = None
            y: int = 3
            print(D(), typing.get_type_hints(D), __annotations__)
        """)

    def test_asyncio_and_subprocesses(self):
        self.same_script("""
            import asyncio, subprocess, sys, os
            async def f():
                p = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(1)", stdout=-1)
                return (await p.communicate())[0]
            print(asyncio.run(f()), subprocess.check_output(["sh", "-c", "echo $RANK; ls /proc/self/fd | wc -l"]))
            print(os.system("exit 3"), os.popen("echo x").read())
        """, RANK="12")

    def test_random_numbers_are_each_forks_own(self):
        text = "import random, multiprocessing as m\nprint(random.random(), m.current_process().authkey)"
        path = self.write("script.py", text)
        found = {self.forked([path], "", self.env)[1] for _ in range(3)}
        self.assertEqual(len(found), 3)
        seeded = self.write("seeded.py", "import random; random.seed(3); print(random.random())")
        self.same(seeded)

    def test_a_script_that_reads_itself_and_writes(self):
        self.same_script("import sys\nprint(open(__file__).read(), file=open('out', 'w'))\n"
                         "sys.stdout.write('\\u20ac\\n'); print('\\udcff'.encode('utf8', 'surrogateescape'))")


class Buffered(Both):
    options = []

    def test_streams(self):
        self.same_script(IDENTITY)
        self.same_script("""
            import os, sys
            print("one")
            os.write(1, b"two\\n")
            sys.stderr.write("three")
            os.write(2, b"four\\n")
        """)
        self.same_script("import os\nprint('lost')\nos._exit(0)")
        self.same_script("import os\nprint('twice')\nif os.fork() == 0: raise SystemExit\nos.wait()")


@unittest.skipIf(sys.version_info < (3, 9), "SKIPPED: forks of 3.8 with -X dev die when they end, without us, too")
class Options(Both):
    options = ["-u", "-W", "error::UserWarning", "-X", "dev", "-O", "-Wignore::ImportWarning"]
    variables = {"PYTHONFAULTHANDLER": "1", "PYTHONHASHSEED": "5", "LC_ALL": "C.UTF-8", "PYTHONWARNINGS": "always"}

    def test_identity(self):
        self.same_script(IDENTITY)

    def test_effects(self):
        self.same_script("import warnings\nprint(hash('a'), __debug__)\nwarnings.warn('w')", code=1)
        rc, _, err = self.same(self.write("script.py", "import ctypes; ctypes.string_at(0)"))
        self.assertEqual(rc, -11)
        self.assertIn("Segmentation fault", err)


class Ascii(Both):
    variables = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

    def test_identity(self):
        self.same_script(IDENTITY)
        self.same_script("print('\\u20ac')", code=1)


if __name__ == "__main__":
    unittest.main()
