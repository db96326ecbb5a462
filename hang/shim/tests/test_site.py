"""What every Python that the job starts sees of the shim: nothing."""

import os
import shutil
import subprocess
import sys
import unittest

from help import Case, HERE, SHIM

NAMES = "import sys; print(sorted(n for n in sys.modules if n.startswith('_dlrover')))"


class Site(Case):
    path = [SHIM]

    def write(self, dir, text):
        """A directory with a sitecustomize that somebody else has written."""
        dir = os.path.join(self.dir, dir)
        os.mkdir(dir)
        with open(os.path.join(dir, "sitecustomize.py"), "w") as f:
            f.write(text)
        return dir

    def python(self, *args, **env):
        p = subprocess.run([sys.executable] + list(args), env=dict(self.env, **env), stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, universal_newlines=True, timeout=120)
        return p.stdout, p.stderr

    def test_installed_without_any_torch(self):
        out, err = self.python("-c", NAMES)
        self.assertEqual((out, err), ("['_dlrover_hang']\n", ""))
        self.assertEqual(self.claimed(), [])

    def test_off(self):
        for dir in ("", None):
            env = dict(self.env)
            env.pop("DLROVER_HANG_DIR")
            if dir is not None:
                env["DLROVER_HANG_DIR"] = dir
            out = subprocess.check_output([sys.executable, "-c", NAMES], env=env, universal_newlines=True)
            self.assertEqual(out, "[]\n")

    def test_imports_little(self):
        code = "import sys; print(len(sys.modules))"
        without = int(self.python("-c", code, PYTHONPATH="")[0])
        self.assertLessEqual(int(self.python("-c", code)[0]) - without, 3)

    def test_options_that_ignore_the_environment(self):
        for option in ("-E", "-I", "-S"):
            self.assertEqual(self.python(option, "-c", NAMES)[0], "[]\n")
        self.assertEqual(self.python("-s", "-c", NAMES)[0], "['_dlrover_hang']\n")

    def test_the_next_one_runs_in_its_place(self):
        user = self.write("user", "import sys; sys.user = __name__, __file__")
        other = self.write("other", "raise Exception('never')")
        code = "import sys, sitecustomize; print(sys.user, sitecustomize.__file__ == sys.user[1], sys.path[1] == %r)"
        out, err = self.python("-c", code % user, PYTHONPATH=os.pathsep.join([SHIM, user, other]))
        self.assertEqual((out, err), (repr(("sitecustomize", os.path.join(user, "sitecustomize.py"))) +
                                      " True True\n", ""))

    def test_one_that_comes_before(self):
        user = self.write("user", "")
        self.assertEqual(self.python("-c", NAMES, PYTHONPATH=os.pathsep.join([user, SHIM])), ("[]\n", ""))

    def test_one_that_raises(self):
        user = self.write("user", "x = 1\nraise ValueError('of the user')\n")
        alone = self.python("-c", "print(1)", PYTHONPATH=user)
        with_us = self.python("-c", "print(1)", PYTHONPATH=os.pathsep.join([SHIM, user]))
        self.assertIn("of the user", alone[1])
        self.assertEqual(with_us, alone)
        _, err = self.python("-v", "-c", "print(1)", PYTHONPATH=os.pathsep.join([SHIM, user]))
        self.assertIn("sitecustomize.py\", line 2, in <module>", err)

    def test_one_that_lacks_a_module(self):
        user = self.write("user", "import not_there_at_all")
        alone = self.python("-c", "print(1)", PYTHONPATH=user)
        self.assertIn("not_there_at_all", alone[1])
        self.assertEqual(self.python("-c", "print(1)", PYTHONPATH=os.pathsep.join([SHIM, user])), alone)

    def test_one_that_exits(self):
        user = self.write("user", "raise SystemExit(0)")
        for path in (user, os.pathsep.join([SHIM, user])):
            out, err = self.python("-c", "print(1)", PYTHONPATH=path)
            self.assertEqual((out, err.splitlines()[-1]), ("", "SystemExit: 0"))

    def test_ones_that_give_way_themselves(self):
        """As tracers do: they hide their directory, or look behind it."""
        hides = self.write("hides", """
import os, sys
here = os.path.dirname(__file__)
path = list(sys.path)
sys.path.remove(here)
del sys.modules["sitecustomize"]
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = sys.modules[__name__] = type(sys)("sitecustomize")
sys.path[:] = path
sys.ran = getattr(sys, "ran", []) + ["hides"]
""")
        last = self.write("last", "import sys; sys.ran = getattr(sys, 'ran', []) + ['last']")
        for path in ([SHIM, hides, last], [hides, SHIM, last]):
            out, err = self.python("-c", "import sys; print(sys.ran, '_dlrover_hang' in sys.modules)",
                                   PYTHONPATH=os.pathsep.join(path))
            self.assertEqual((out, err), ("['last', 'hides'] True\n", ""))

    def test_a_relative_path_and_a_link(self):
        os.symlink(SHIM, os.path.join(self.dir, "link"))
        for path in (os.path.relpath(SHIM), os.path.join(self.dir, "link"), SHIM + "/", SHIM + os.pathsep + SHIM):
            self.assertEqual(self.python("-c", NAMES, PYTHONPATH=path), ("['_dlrover_hang']\n", ""))

    def test_damaged(self):
        """Half a tree is no tree, and no reason not to run."""
        dir = os.path.join(self.dir, "half")
        os.mkdir(dir)
        shutil.copy(os.path.join(SHIM, "sitecustomize.py"), dir)
        self.assertEqual(self.python("-c", NAMES, PYTHONPATH=dir), ("[]\n", ""))

    def test_children_of_multiprocessing(self):
        code = """
import multiprocessing, sys
def f(x):
    return sorted(n for n in sys.modules if n.startswith("_dlrover")), x
if __name__ == "__main__":
    for how in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(how).Pool(1) as p:
            print(p.map(f, [how]))
"""
        script = os.path.join(self.dir, "script.py")
        with open(script, "w") as f:
            f.write(code)
        out, err = self.python(script)
        self.assertEqual(err, "")
        self.assertEqual(out.splitlines(), ["[(['_dlrover_hang'], '%s')]" % h for h in ("fork", "spawn", "forkserver")])
        self.assertEqual(self.claimed(), [])

    def test_virtual_environment(self):
        venv = os.path.join(self.dir, "venv")
        subprocess.check_call([sys.executable, "-m", "venv", "--without-pip", venv],
                              env=dict(self.env, PYTHONPATH=""))
        out = subprocess.check_output([os.path.join(venv, "bin", "python"), "-c", NAMES], env=self.env,
                                      universal_newlines=True)
        self.assertEqual(out, "['_dlrover_hang']\n")


class Modules(Case):
    """The modules that are watched are what they would be."""

    path = [SHIM, HERE, os.path.join(HERE, "fake")]

    def test_loader_and_source(self):
        self.run_code("""
            import inspect, importlib.machinery, pickle, torch
            for name in ("torch.serialization", "torch.optim.optimizer"):
                m = sys.modules[name]
                assert type(m.__loader__) is importlib.machinery.SourceFileLoader, m.__loader__
                assert "exec_module" not in vars(m.__loader__) and m.__spec__.loader is m.__loader__
            assert "Takes so long" in inspect.getsource(torch.save) and torch.save.__name__ == "save"
            assert pickle.loads(pickle.dumps(torch.save)) is torch.save is torch.serialization.save
            assert str(inspect.signature(torch.load)) == "(f)"
        """)

    def test_reloaded(self):
        self.run_code("""
            import importlib, torch, torch.optim.optimizer
            for _ in range(2):
                torch.optim.Optimizer().step()
                importlib.reload(sys.modules["torch.optim.optimizer"])
                importlib.reload(sys.modules["torch.serialization"])
                assert hasattr(torch.serialization.save, "_dlrover_hang")
                sys.modules["torch.optim.optimizer"].Optimizer().step()
            assert page().steps == 4, page().steps
        """)

    def test_finders_that_ask_the_others(self):
        self.run_code("""
            import importlib.util
            class Asks:
                busy = set()
                def find_spec(self, name, path=None, target=None):
                    if name in self.busy:
                        return None
                    self.busy.add(name)
                    try:
                        return importlib.util.find_spec(name)
                    finally:
                        self.busy.remove(name)
            sys.meta_path.insert(0, Asks())
            sys.meta_path.insert(2, Asks())
            import torch
            torch.optim.Optimizer().step()
            assert page().steps == 1
        """)

    def test_an_import_that_fails(self):
        broken = os.path.join(self.dir, "torch")
        os.mkdir(broken)
        with open(os.path.join(broken, "__init__.py"), "w") as f:
            f.write("from . import serialization")
        with open(os.path.join(broken, "serialization.py"), "w") as f:
            f.write("raise OSError('a library is missing')")
        self.run_code("""
            for _ in range(2):
                try:
                    import torch
                    raise AssertionError
                except OSError as e:
                    assert str(e) == "a library is missing"
        """, PYTHONPATH=os.pathsep.join([SHIM, self.dir]))

    def test_a_strange_torch(self):
        """A module of another shape is watched as far as that goes, and works."""
        broken = os.path.join(self.dir, "torch")
        os.makedirs(os.path.join(broken, "optim"))
        for name in ("__init__.py", "optim/__init__.py"):
            open(os.path.join(broken, name), "w").close()
        with open(os.path.join(broken, "optim", "optimizer.py"), "w") as f:
            f.write("x = 1")
        with open(os.path.join(broken, "serialization.py"), "w") as f:
            f.write("save = 1\nload = print")
        self.run_code("""
            import torch.optim.optimizer, torch.serialization
            assert torch.optim.optimizer.x == 1 and torch.serialization.save == 1
            assert torch.serialization.load is print
        """, PYTHONPATH=os.pathsep.join([SHIM, self.dir]))


if __name__ == "__main__":
    unittest.main()
