"""The package dlrover beside an installed one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest
import zipfile
from typing import List, Union

PYTHON = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SAID = "flash checkpoints are served by dlrover_ckpt"


class _Case(unittest.TestCase):
    def setUp(self) -> None:
        self.installed = tempfile.mkdtemp(prefix="dlrover-test-")
        self.addCleanup(shutil.rmtree, self.installed)

    def install(self) -> None:
        """Puts a dlrover there that has storage, and modules which we have not."""
        for package in ("", "python", "python/common", "python/master", "trainer", "trainer/torch",
                        "trainer/torch/elastic", "python/elastic_agent", "python/elastic_agent/sharding"):
            path = os.path.join(self.installed, "dlrover", package)
            os.makedirs(path, exist_ok=True)
            with open(os.path.join(path, "__init__.py"), "w") as f:
                f.write("INSTALLED = True\n")
        for module in ("python/common/storage", "python/common/env_utils", "python/common/constants",
                       "python/master/main", "trainer/torch/elastic/sampler",
                       "python/elastic_agent/master_client", "python/elastic_agent/sharding/client"):
            with open(os.path.join(self.installed, "dlrover", module + ".py"), "w") as f:
                f.write("WHERE = 'installed'\n")

    def run_python(self, script: Union[str, List[str]], *path: str, **env: str) -> "subprocess.CompletedProcess[str]":
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "DLROVER_CKPT_CLIENT")}
        environment.update(env, PYTHONPATH=os.pathsep.join(path), PYTHONDONTWRITEBYTECODE="1")
        command = script if isinstance(script, list) else ["-c", textwrap.dedent(script)]
        return subprocess.run([sys.executable] + command, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=60)


class Installed(_Case):
    """DLRover itself, beside ours or alone."""

    def test_ours_win_and_the_others_stay(self) -> None:
        self.install()
        script = """
            import dlrover.python.common.storage as storage, dlrover.python.common.env_utils as env_utils
            import dlrover.python.master.main as main, dlrover.python.common.constants as constants
            print(hasattr(storage, "KeepLatestStepStrategy"), env_utils.WHERE, main.WHERE, constants.WHERE)
        """
        done = self.run_python(script, PYTHON, self.installed)
        self.assertEqual("True installed installed installed", done.stdout.strip(), done.stderr)
        self.assertEqual(1, done.stderr.count(SAID), done.stderr)
        self.assertEqual("", self.run_python(script, PYTHON, self.installed, RANK="1").stderr)

    def test_elastic_training_is_the_installed_one(self) -> None:
        """It asks no launcher, so nothing is gained by ours; what an older DLRover lacks is ours all the same."""
        script = """
            from dlrover.trainer.torch.elastic.sampler import %s
            from dlrover.trainer.torch.elastic.trainer import ElasticTrainer
            import dlrover.trainer.torch.flash_checkpoint.ddp
        """
        self.install()
        for name, path, code in (("WHERE", [PYTHON, self.installed], 0), ("WHERE", [PYTHON], 1),
                                 ("ElasticDistributedSampler", [PYTHON, self.installed], 1),
                                 ("ElasticDistributedSampler", [PYTHON], 0)):
            done = self.run_python(script % name, *path)
            self.assertEqual(code, done.returncode, (name, path, done.stderr))

    def test_data_shards_are_those_of_who_serves_the_store(self) -> None:
        """Of the launcher, ours; under DLRover's master, where workers serve it, the installed ones ask that master."""
        script = """
            import dlrover.python.elastic_agent.sharding.client as c
            print(hasattr(c, "IndexShardingClient"), getattr(c, "WHERE", ""))
            from dlrover.python.elastic_agent.master_client import WHERE
        """
        self.install()
        for agent, path, out, code in (("True", [PYTHON, self.installed], "True ", 0), ("True", [PYTHON], "True ", 1),
                                       ("False", [PYTHON, self.installed], "False installed", 0),
                                       ("False", [PYTHON], "True ", 1)):
            done = self.run_python(script, *path, TORCHELASTIC_USE_AGENT_STORE=agent)
            self.assertEqual((out, code), (done.stdout.strip("\n"), done.returncode), (agent, path, done.stderr))
        self.assertIn("pip install dlrover", done.stderr, "there is no master client in ours")

    def test_alone(self) -> None:
        done = self.run_python("""
            import sys
            import dlrover.python.common.storage
            import dlrover.trainer.torch.flash_checkpoint.megatron
            import dlrover.trainer.torch.flash_checkpoint.megatron_dist_ckpt
            import dlrover.trainer.torch.flash_checkpoint.deepspeed
            from dlrover.python.common.constants import CheckpointConstant
            print(sorted({"torch", "numpy", "megatron", "deepspeed"} & set(sys.modules)),
                  CheckpointConstant.SAVE_TIMEOUT)
        """, PYTHON)
        self.assertEqual(("[] 600", ""), (done.stdout.strip(), done.stderr))

    def test_steps_aside(self) -> None:
        self.install()
        done = self.run_python("""
            import dlrover, dlrover.python.common.storage as storage
            print(dlrover.INSTALLED, storage.WHERE, len(dlrover.__path__), dlrover.__file__)
        """, PYTHON, self.installed, DLROVER_CKPT_CLIENT="upstream")
        self.assertEqual("True installed 1 " + os.path.join(self.installed, "dlrover", "__init__.py"),
                         done.stdout.strip(), done.stderr)
        self.assertEqual("", done.stderr)

    def test_steps_aside_for_nobody(self) -> None:
        done = self.run_python("import dlrover", PYTHON, DLROVER_CKPT_CLIENT="upstream")
        self.assertEqual(1, done.returncode)
        self.assertIn("ImportError: DLROVER_CKPT_CLIENT=upstream, but no other dlrover is installed", done.stderr)

    def test_a_copy_of_ours_is_no_other(self) -> None:
        copy = os.path.join(self.installed, "copy")
        shutil.copytree(PYTHON, copy, ignore=shutil.ignore_patterns("__pycache__", "tests"))
        script = "import dlrover.python.common.storage as storage; print(storage.__file__)"
        done = self.run_python(script, PYTHON, copy)
        self.assertEqual((os.path.join(PYTHON, "dlrover", "python", "common", "storage.py"), ""),
                         (done.stdout.strip(), done.stderr))
        self.install()
        self.assertEqual(1, self.run_python(script, PYTHON, copy, self.installed).stderr.count(SAID))

    def test_what_is_missing_says_what_to_do(self) -> None:
        for script in ("import dlrover.trainer.torch.node_check.utils", "from dlrover.trainer.torch import utils",
                       "from dlrover.python.common.log import default_logger",
                       "from dlrover.python.common.constants import NodeEnv"):
            done = self.run_python(script, PYTHON)
            last = done.stderr.splitlines()[-1]
            self.assertRegex(last, "^(ModuleNotFoundError: No module named 'dlrover.|ImportError: .*NodeEnv: )")
            self.assertIn("pip install dlrover", last)

    def test_whoever_asks_for_a_missing_module_is_told_that_there_is_none(self) -> None:
        done = self.run_python("""
            import importlib.util, pkgutil
            for name in ("dlrover.x", "dlrover.trainer.x", "dlrover.trainer.torch.utils", "dlrover_ckpt.x"):
                print(importlib.util.find_spec(name))
            print(importlib.util.find_spec("dlrover.trainer").name)
            try:
                importlib.import_module("dlrover.x")
            except ModuleNotFoundError as e:
                print(e)
        """, PYTHON)
        lines = done.stdout.splitlines()
        self.assertEqual(["None"] * 4 + ["dlrover.trainer"], lines[:5], done.stderr)
        self.assertIn("pip install dlrover", lines[5])

    def test_an_editable_installation_is_found(self) -> None:
        self.install()
        done = self.run_python(EDITABLE % os.path.join(self.installed, "dlrover") + textwrap.dedent("""
            import dlrover.python.common.storage as storage, dlrover.python.common.env_utils as env_utils
            print(hasattr(storage, "KeepLatestStepStrategy"), env_utils.WHERE)
        """), PYTHON)
        self.assertEqual("True installed", done.stdout.strip(), done.stderr)
        self.assertEqual(1, done.stderr.count(SAID), done.stderr)


EDITABLE = """
import importlib.util, sys
class Finder:  # as setuptools makes one
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, %r + "/__init__.py") if name == "dlrover" else None
sys.meta_path.append(Finder)
"""


class OfTheUser(_Case):
    """A package dlrover that has nothing to do with DLRover is what it would be without ours on the path."""

    def setUp(self) -> None:
        super().setUp()
        self.own = os.path.join(self.installed, "own")
        self.write("dlrover/__init__.py", "from . import part\n\n\ndef here():\n    return part.WHERE, __name__\n")
        self.write("dlrover/part.py", "WHERE = 'own'\n")
        self.write("dlrover/tool.py", "import dlrover, sys\nprint(__name__, dlrover.here(), sys.argv[1:])\n")
        self.write("dlrover/__main__.py", "import dlrover\nprint('main', __package__, dlrover.here())\n")

    def write(self, name: str, text: str) -> None:
        path = os.path.join(self.own, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as f:
            f.write(text)

    def same(self, script: Union[str, List[str]], *path: str, code: int = 0) -> str:
        """Runs a script with ours before the path, and without: nothing tells the one from the other."""
        alone = self.run_python(script, *path)
        beside = self.run_python(script, PYTHON, *path)
        self.assertEqual((code, alone.stdout, alone.stderr), (beside.returncode, beside.stdout, beside.stderr))
        return alone.stdout + alone.stderr

    def test_is_itself(self) -> None:
        self.assertIn("own", self.same("""
            import dlrover, importlib, importlib.util, inspect, pickle, sys
            import dlrover.tool
            print(dlrover.here(), dlrover.__file__, dlrover.__path__, dlrover.__package__, dlrover.__spec__.name,
                  dlrover.__spec__.origin, dlrover.__spec__.submodule_search_locations, sorted(vars(dlrover)))
            print(importlib.util.find_spec("dlrover").origin, importlib.util.find_spec("dlrover.part").origin)
            print(importlib.util.find_spec("dlrover.none"), importlib.util.find_spec("dlrover_ckpt"))
            print(importlib.reload(dlrover) is dlrover is sys.modules["dlrover"], inspect.getsource(dlrover.here))
            print(pickle.loads(pickle.dumps(dlrover.here)) is dlrover.here, sys.path, len(sys.meta_path))
        """, self.own))

    def test_runs_as_a_program(self) -> None:
        self.assertIn("__main__ ('own', 'dlrover') ['-x']", self.same(["-m", "dlrover.tool", "-x"], self.own))
        self.assertIn("main dlrover ('own', 'dlrover')", self.same(["-m", "dlrover"], self.own))

    def test_beside_the_script(self) -> None:
        self.write("script.py", "import dlrover\nprint(dlrover.here(), dlrover.__file__)\n")
        self.assertIn("own", self.same([os.path.join(self.own, "script.py")], self.installed))

    def test_module(self) -> None:
        shutil.rmtree(os.path.join(self.own, "dlrover"))
        self.write("dlrover.py", "X = 3\n")
        self.assertIn("3", self.same("import dlrover; print(dlrover.X, dlrover.__file__, hasattr(dlrover, '__path__'))",
                                     self.own))
        self.assertIn("not a package", self.same("import dlrover.x", self.own, code=1))

    def test_zip(self) -> None:
        archive = os.path.join(self.installed, "own.zip")
        with zipfile.ZipFile(archive, "w") as z:
            for name in ("dlrover/__init__.py", "dlrover/part.py"):
                z.write(os.path.join(self.own, name), name)
        self.assertIn("own", self.same("import dlrover; print(dlrover.here(), dlrover.__file__)", archive))

    def test_editable_installation(self) -> None:
        self.assertIn("own", self.same(EDITABLE % os.path.join(self.own, "dlrover") + textwrap.dedent("""
            import dlrover
            print(dlrover.here(), dlrover.__file__, dlrover.__path__)
        """)))

    def test_processes_of_its_own(self) -> None:
        self.write("jobs.py", """if __name__ == "__main__":
    import multiprocessing
    import dlrover
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(dlrover.here(), pool.apply(dlrover.here))
""")
        self.assertIn("('own', 'dlrover') ('own', 'dlrover')", self.same(["-m", "jobs"], self.own))

    def test_its_own_failure(self) -> None:
        self.write("dlrover/part.py", "import dlrover.none\n")
        self.assertIn("No module named 'dlrover.none'", self.same("""
            try:
                import dlrover
            except ImportError as e:
                print(e)
            import dlrover.part
        """, self.own, code=1).splitlines()[0])

    def test_the_first_on_the_path_counts(self) -> None:
        self.install()
        self.same("import dlrover; print(dlrover.__file__)", self.own, self.installed)
        done = self.run_python("import dlrover.python.common.storage as s; print(s.__file__)", PYTHON, self.installed,
                               self.own)
        self.assertIn(PYTHON, done.stdout, done.stderr)
        self.assertEqual(1, done.stderr.count(SAID))

    def test_directory_without_init(self) -> None:
        """It may be anything, checkpoints for example: ours stays, and the modules in it are found."""
        os.remove(os.path.join(self.own, "dlrover", "__init__.py"))
        done = self.run_python("import dlrover.part, dlrover.python.common.storage as s; print(dlrover.part.WHERE, s)",
                               PYTHON, self.own)
        self.assertIn("own <module", done.stdout, done.stderr)
        self.assertIn(PYTHON, done.stdout)
        self.assertEqual("", done.stderr)


if __name__ == "__main__":
    unittest.main()
