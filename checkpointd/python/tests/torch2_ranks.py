"""What the test_torch2_* modules share: real gloo ranks in processes of their own, and images written by hand."""

from __future__ import annotations

import glob
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import unittest
import zlib
from typing import Any, Dict, Iterable, List

PYTHON = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SECONDS = 90  # for one job of a test


def missing(*modules: str) -> str:
    """Why the tests cannot run here; empty if they can."""
    try:
        import torch

        if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 1):
            return "torch %s is older than 2.1" % torch.__version__
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return ""


def need(*modules: str) -> None:
    """For setUpModule: skips all tests of the module, and says so where nobody overlooks it."""
    reason = missing(*modules)
    if reason:
        print("\nSKIPPED: %s" % reason, file=sys.stderr)
        raise unittest.SkipTest(reason)


def run(module: str, function: str, world: int, directory: str, **arguments: Any) -> List[Any]:
    """Runs module.function(directory, **arguments) in `world` ranks; returns what each returned (JSON)."""
    here = tempfile.mkdtemp(prefix="ranks-", dir=directory)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([PYTHON, os.environ.get("PYTHONPATH", "")]),
                       CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", ""),  # there may be fewer than ranks
                       OMP_NUM_THREADS="1", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                       TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    processes = []
    for rank in range(world):
        task = json.dumps([module, function, here, directory, arguments])
        with open(os.path.join(here, "log%d" % rank), "w") as log:
            processes.append(subprocess.Popen(
                [sys.executable, "-m", "tests.torch2_ranks", task], cwd=PYTHON, stdout=log, stderr=log,
                env=dict(environment, RANK=str(rank), LOCAL_RANK=str(rank))))
    try:
        failed = [rank for rank, p in enumerate(processes) if p.wait(SECONDS) != 0]
    except subprocess.TimeoutExpired:
        failed = [rank for rank, p in enumerate(processes) if p.poll() is None]
    finally:
        for p in processes:
            p.kill()
            p.wait()
        for left in glob.glob("/dev/shm/dlrover-%d/t%d-*" % (os.getuid(), os.getpid())):  # what the ranks had in memory
            shutil.rmtree(left, ignore_errors=True)
    if failed:
        texts = [_tail(os.path.join(here, "log%d" % rank)) for rank in range(world)]
        raise AssertionError("ranks %s of %s failed\n%s" % (failed, function, "\n".join(texts)))
    results = []
    for rank in range(world):
        with open(os.path.join(here, "result%d" % rank)) as f:
            results.append(json.load(f))
    shutil.rmtree(here)
    return results


def _tail(path: str) -> str:
    with open(path) as f:
        text = f.read()
    return "---- %s\n%s" % (os.path.basename(path), text[max(text.rfind("Traceback"), 0):][:4000])


def _main(task: str) -> None:
    import torch
    import torch.distributed as dist

    module, function, here, directory, arguments = json.loads(task)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    target = getattr(importlib.import_module(module), function)
    if not arguments.pop("no_group", False):
        dist.init_process_group("gloo", init_method="file://%s/rendezvous" % here, rank=rank, world_size=world)
    try:
        result = target(directory, **arguments)
        if dist.is_initialized():
            dist.barrier()
        with open(os.path.join(here, "result%d" % rank), "w") as f:
            json.dump(result, f)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def bytes_of(image: Any) -> bytearray:
    """The file that an image means, checksums included."""
    import torch

    out = bytearray(image.length)
    for offset, data in image.pieces:
        out[offset:offset + len(data)] = data
    for offset, nbytes, storage in image.tensors:
        if nbytes:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)[:nbytes]
            torch.frombuffer(out, dtype=torch.uint8, count=nbytes, offset=offset).copy_(flat)
    for offset, length, first, second in image.fixups:
        crc = zlib.crc32(memoryview(out)[offset:offset + length]).to_bytes(4, "little")
        for at in (first, second):
            if at:
                out[at:at + 4] = crc
    return out


def write(images: Iterable[Any], directory: str) -> Dict[str, memoryview]:
    """Writes images as files; returns their contents."""
    views = {}
    for image in images:
        body = bytes_of(image)
        path = os.path.join(directory, image.path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(body)
        views[image.path] = memoryview(body)
    return views


def same(a: Any, b: Any) -> bool:
    """Bit for bit equality of tensors, with dtype and shape."""
    import torch

    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    return (a.dtype == b.dtype and a.shape == b.shape
            and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))


if __name__ == "__main__":
    _main(sys.argv[1])
