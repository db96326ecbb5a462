"""The package dlrover beside an installed one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest

PYTHON = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SAID = "flash checkpoints are served by dlrover_ckpt"


class Package(unittest.TestCase):
    def setUp(self) -> None:
        self.installed = tempfile.mkdtemp(prefix="dlrover-test-")
        self.addCleanup(shutil.rmtree, self.installed)

    def install(self) -> None:
        """Puts a dlrover there that has storage, and modules which we have not."""
        for package in ("", "python", "python/common", "python/master", "trainer", "trainer/torch"):
            path = os.path.join(self.installed, "dlrover", package)
            os.makedirs(path, exist_ok=True)
            with open(os.path.join(path, "__init__.py"), "w") as f:
                f.write("INSTALLED = True\n")
        for module in ("python/common/storage", "python/common/env_utils", "python/master/main"):
            with open(os.path.join(self.installed, "dlrover", module + ".py"), "w") as f:
                f.write("WHERE = 'installed'\n")

    def run_python(self, script: str, *path: str, **env: str) -> "subprocess.CompletedProcess[str]":
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "DLROVER_CKPT_CLIENT")}
        environment.update(env, PYTHONPATH=os.pathsep.join(path), PYTHONDONTWRITEBYTECODE="1")
        return subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=60)

    def test_ours_win_and_the_others_stay(self) -> None:
        self.install()
        script = """
            import dlrover.python.common.storage as storage, dlrover.python.common.env_utils as env_utils
            import dlrover.python.master.main as main
            print(hasattr(storage, "KeepLatestStepStrategy"), env_utils.WHERE, main.WHERE)
        """
        done = self.run_python(script, PYTHON, self.installed)
        self.assertEqual("True installed installed", done.stdout.strip(), done.stderr)
        self.assertEqual(1, done.stderr.count(SAID), done.stderr)
        self.assertEqual("", self.run_python(script, PYTHON, self.installed, RANK="1").stderr)

    def test_alone(self) -> None:
        done = self.run_python("""
            import sys
            import dlrover.python.common.storage
            import dlrover.trainer.torch.flash_checkpoint.megatron
            import dlrover.trainer.torch.flash_checkpoint.megatron_dist_ckpt
            import dlrover.trainer.torch.flash_checkpoint.deepspeed
            print(sorted({"torch", "numpy", "megatron", "deepspeed"} & set(sys.modules)))
        """, PYTHON)
        self.assertEqual(("[]", ""), (done.stdout.strip(), done.stderr))

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


if __name__ == "__main__":
    unittest.main()
