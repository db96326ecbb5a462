"""What the test_adapters_* modules share: training jobs in processes of their own, which start again and again."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import unittest
from typing import Any, Dict, List, Sequence

HERE = os.path.dirname(os.path.abspath(__file__))
SECONDS = 240  # for one start of a job; DeepSpeed compiles an operator at its first
_FORK = multiprocessing.get_context("fork")


def _rank(function: Any, arguments: Sequence[Any], path: str, environment: Dict[str, str], results: str) -> None:
    """The process of one rank, forked where torch is imported already, so that a start takes no seconds."""
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    log = os.open(os.path.join(results, "log%d" % rank), os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    sys.path[:0] = [path] if path else []
    if world > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method="file://" + os.path.join(results, "rendezvous"), rank=rank,
                                world_size=world)
    value = function(*arguments)
    with open(os.path.join(results, str(rank)), "w") as f:
        json.dump(value, f)


class JobCase(unittest.TestCase):
    """A job with a checkpoint directory, whose shared memory outlives its processes."""

    @classmethod
    def setUpClass(cls) -> None:
        import torch.distributed

        torch.set_num_threads(1)

    def setUp(self) -> None:
        self.base = tempfile.mkdtemp(prefix="dlrover-test-")
        self.addCleanup(shutil.rmtree, self.base)
        self.dir = os.path.join(self.base, "checkpoints")
        self.runtime = os.path.join(self.base, "runtime")
        for path in (self.runtime, os.path.join(self.runtime, "seg"), os.path.join(self.runtime, "peer")):
            os.mkdir(path, 0o700)
        self.starts = 0
        self.log = ""

    def start(self, function: Any, *arguments: Any, ranks: int = 1, path: str = "") -> List[Any]:
        """Runs a function on each rank of a fresh job and returns what the ranks return; path goes on sys.path."""
        self.starts += 1
        results = tempfile.mkdtemp(dir=self.base)
        environment = dict(DLROVER_CKPT_RUNTIME=self.runtime, DLROVER_CKPT_EPOCH=str(self.starts),
                           WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        processes = [_FORK.Process(target=_rank, args=(
            function, arguments, path, dict(environment, RANK=str(rank), LOCAL_RANK=str(rank)), results))
            for rank in range(ranks)]
        deadline = time.monotonic() + SECONDS
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        self.log = ""
        for rank in range(ranks):
            with open(os.path.join(results, "log%d" % rank)) as f:
                self.log += f.read()
        self.assertEqual([0] * ranks, codes, self.log)
        values: List[Any] = []
        for rank in range(ranks):
            with open(os.path.join(results, str(rank))) as f:
                values.append(json.load(f))
        return values

    def text(self, *names: str) -> str:
        """The content of a file below the checkpoint directory; "" when there is none."""
        try:
            with open(os.path.join(self.dir, *names)) as f:
                return f.read()
        except FileNotFoundError:
            return ""

    def visible(self) -> List[str]:
        """The names in the checkpoint directory, without those of the engine."""
        if not os.path.isdir(self.dir):
            return []
        return sorted(name for name in os.listdir(self.dir) if name not in (".dlrover", "dlrover_latest.txt"))


def megatron_args(directory: str, **changes: Any) -> argparse.Namespace:
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return argparse.Namespace(**dict(dict(
        save=directory, load=directory, use_distributed_optimizer=False, no_save_optim=False, finetune=False,
        tensor_rank=0, data_parallel_rank=rank), **changes))
