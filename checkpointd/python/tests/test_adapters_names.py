"""The names that programs written for DLRover import, and how they call them.

dlrover_names.txt has those of DLRover 0.6.1: the classes, functions and re-exports of each module of its packages for
checkpoints and elastic training, with the names of the parameters; an "=" marks those with a default, and "self" what
objects have.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import unittest
from typing import Any, Iterator, List, Set

from tests.adapters_jobs import HERE

INSTALLED = "BENCH_DLROVER_PYTHON"  # a Python that has DLRover; the benchmark knows it by this name, too
NAMES = os.path.join(HERE, "dlrover_names.txt")
FLASH = "dlrover.trainer.torch.flash_checkpoint"
WHERE = {
    "storage": "dlrover.python.common", "constants": "dlrover.python.common", "sampler": "dlrover.trainer.torch.elastic",
    "dataloader": "dlrover.trainer.torch.elastic", "trainer": "dlrover.trainer.torch.elastic",
    "client": "dlrover.python.elastic_agent.sharding",
}  # of those that are not in FLASH
CONSTANTS = "CheckpointConstant"  # of the module constants only this class concerns checkpoints

# What has no place here, and what the message about it speaks of.
LACKING = {
    "engine": {"ReadyTensor": "agree", "check_all_rank_ready": "agree", "verify_all_rank_step_consistent": "agree",
               "start_async_save": "daemon", "start_saver_process": "daemon", "wait_socket_server": "daemon",
               "timer": "log"},
    "fsdp_engine": {"SharedMemoryWriter": "save_checkpoint", "SharedMemoryReader": "get_storage_reader",
                    "FileReader": "FileSystemReader", "SlicedBufferedReader": "FileSystemReader"},
    "replica": {"CkptReplicaManger": "replica_count", "ShardCkptReplicaManager": "replica_count",
                "FullCkptReplicaManager": "replica_count"},
    "trainer": {"TrainingRecord": "dlroverctl", "find_free_port": "--ports", "get_rank": "torch.distributed"},
}
# Of the parts of DLRover that are about something else, or of the classes that its savers are.
FOREIGN = {"CheckpointConfig", "ConfigPath", "DLROVER_CKPT_CONFIG_KEY", "DeepSpeedCheckpointSaver",
           "ElasticDataLoader", "JsonSerializable", "MasterClient", "MegatronCheckpointSaver", "SharedMemoryHandler",
           "Singleton", "TFTrainingReporter", "T_co", "comm", "elastic_training_pb2", "env_utils", "logger"}
# Of the engines: there are no savers in Python. Of FlashCkptTrainer: it has wait_latest_checkpoint itself. Of
# ElasticTrainer and ElasticDataLoader: what they call themselves.
UNUSED = {"get_saver_class", "saver_proc", "local_shard_id", "flash_checkpointer", "check_sync_gradient", "init_config",
          "report_training_step"}


def _parameters(function: Any) -> str:
    a = function.args
    names = [arg.arg for arg in a.args if arg.arg not in ("self", "cls")]
    required = len(names) - len(a.defaults)
    return ", ".join(name + "=" * (i >= required) for i, name in enumerate(names))


def _attributes(node: ast.ClassDef) -> Set[str]:
    """The public attributes that a class gives its objects."""
    found = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return {n.attr for n in found if isinstance(n.value, ast.Name) and n.value.id == "self" and n.attr[0] != "_"}


def _has(cls: Any, attribute: str) -> bool:
    return hasattr(cls, attribute) or any(
        re.search(r"self\.%s(: [^=]+)? = " % attribute, inspect.getsource(c)) for c in cls.__mro__[:-1])


def _declared(path: str, module: str) -> Iterator[str]:
    """What a source file declares, one line each; nothing is imported."""
    with open(path) as f:
        nodes = ast.parse(f.read()).body
    for node in nodes:
        if isinstance(node, ast.ClassDef) and node.name[0] != "_" and (module != "constants" or node.name == CONSTANTS):
            yield "%s %s" % (module, node.name)
            for name in sorted(_attributes(node)):
                yield "%s %s.%s self" % (module, node.name, name)
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and (member.name == "__init__" or member.name[0] != "_"):
                    yield "%s %s.%s(%s)" % (module, node.name, member.name, _parameters(member))
                elif isinstance(member, ast.Assign) and isinstance(member.value, ast.Constant):
                    yield "%s %s.%s = %r" % (module, node.name, member.targets[0].id, member.value.value)
        elif isinstance(node, ast.FunctionDef) and node.name[0] != "_":
            yield "%s %s(%s)" % (module, node.name, _parameters(node))
        elif isinstance(node, ast.Assign) and node.targets[0].id[0] != "_" and node.targets[0].id not in FOREIGN:
            yield "%s %s" % (module, node.targets[0].id)
        elif isinstance(node, ast.ImportFrom) and (node.level or node.module.startswith("dlrover.")):
            if module.endswith("engine"):
                continue  # what they use themselves
            for alias in node.names:
                if (alias.asname or alias.name) not in FOREIGN:
                    yield "%s %s" % (module, alias.asname or alias.name)


def _all_declared(top: str) -> Set[str]:
    """The lines of a whole installation, by its directory dlrover."""
    flash = os.path.join(top, "trainer", "torch", "flash_checkpoint")
    files = [os.path.join(flash, name) for name in os.listdir(flash) if name.endswith(".py") and name[0] != "_"]
    files += [os.path.join(top, *package.split(".")[1:], name + ".py") for name, package in WHERE.items()]
    return {line for path in files for line in _declared(path, os.path.basename(path)[:-3])}


def _lines() -> List[str]:
    with open(NAMES) as f:
        return f.read().splitlines()


class Names(unittest.TestCase):
    def test_the_list_is_that_of_the_installed_package(self) -> None:
        python = os.environ.get(INSTALLED)
        if not python:
            self.skipTest("THE NAMES ARE NOT COMPARED WITH DLROVER'S: %s names no Python that has it" % INSTALLED)
        find = "import importlib.util as u; print(list(u.find_spec('dlrover').submodule_search_locations)[0])"
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        top = subprocess.run([python, "-c", find], env=environment, cwd="/", stdout=subprocess.PIPE, text=True,
                             check=True, timeout=60).stdout.strip()
        self.assertEqual(_lines(), sorted(_all_declared(top)))

    def test_every_name_is_here_or_says_what_to_use(self) -> None:
        for line in _lines():
            with self.subTest(line):
                self._check(*line.split(" ", 1))

    def _check(self, module: str, rest: str) -> None:
        name, _, parameters = rest.partition("(")
        name, _, value = name.partition(" = ")
        where = WHERE.get(module, FLASH)
        first, _, method = name.partition(".")
        said = LACKING.get(module, {}).get(first)
        if said:
            with self.assertRaisesRegex(ImportError, said) as caught:
                getattr(importlib.import_module(where + "." + module), first)
            self.assertNotIn("\n", str(caught.exception))
            return
        if first == "FlashCkptTrainer" and not importlib.util.find_spec("transformers"):
            return
        found = getattr(importlib.import_module(where + "." + module), first)
        method, _, attribute = method.partition(" ")
        if method in UNUSED:
            return
        if attribute:
            self.assertTrue(_has(found, method), "%s objects have no %s" % (first, method))
            return
        if method:
            found = getattr(found, method)
        if value:
            self.assertEqual(value, repr(found))
        if parameters and not isinstance(found, property):
            self._check_call(found, parameters[:-1].split(", ") if parameters != ")" else [])

    def _check_call(self, function: Any, wanted: List[str]) -> None:
        """Whether a function can be called with these parameters, by place and by name."""
        have = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
        plain = [p for p in have if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if len(plain) < len(have) and len(plain) < len(wanted):  # *args and **kwargs take the rest
            wanted = wanted[:len(plain)]
        self.assertEqual([w.rstrip("=") for w in wanted], [p.name for p in plain[:len(wanted)]])
        for w, p in zip(wanted, plain):
            self.assertTrue(p.default is not p.empty or not w.endswith("="), "%s needs a default" % p.name)
        for p in plain[len(wanted):]:
            self.assertIsNot(p.empty, p.default, "%s is one more that has to be given" % p.name)


if __name__ == "__main__":
    unittest.main()
