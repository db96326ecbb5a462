"""The examples of the user's guide; the one for Megatron-LM is in test_adapters_megatron."""

from __future__ import annotations

import os
import unittest
from typing import Any, List

from tests.adapters_jobs import JobCase


def _training() -> Any:
    import torch

    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def ddp(checkpoint_dir: str) -> Any:
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

    model, optimizer = _training()
    checkpointer = DdpCheckpointer(checkpoint_dir)
    state_dict = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 10}
    ckpt_path = os.path.join(checkpoint_dir, "checkpoint-10.pt")
    checkpointer.save_checkpoint(10, state_dict, ckpt_path, storage_type=StorageType.DISK)
    checkpointer.wait_latest_checkpoint()
    state_dict["step"] = 11
    checkpointer.save_checkpoint(11, state_dict, storage_type=StorageType.MEMORY)
    return float(model.weight.sum())


def ddp_again(checkpoint_dir: str) -> Any:
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

    model, optimizer = _training()
    model.weight.data.zero_()
    state_dict = DdpCheckpointer(checkpoint_dir).load_checkpoint()
    model.load_state_dict(state_dict["model"])
    optimizer.load_state_dict(state_dict["optimizer"])
    return [float(model.weight.sum()), state_dict["step"]]


def _sharded() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    import torch

    model, _ = _training()
    model = FSDP(model, device_id=torch.device("cpu"))
    return model, FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)


def _sum(model: Any) -> float:
    import torch.distributed as dist

    total = sum(p.detach().sum() for p in model.parameters()).clone()
    dist.all_reduce(total)
    return float(total)


def fsdp(checkpoint_dir: str) -> Any:
    from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpShardCheckpointer, StorageType

    checkpointer = FsdpShardCheckpointer(checkpoint_dir)
    model, sharded = _sharded()
    with sharded:
        state_dict = {"model": model.state_dict(), "step": 10}
        ckpt_dir = os.path.join(checkpoint_dir, "10")
        checkpointer.save_checkpoint(10, state_dict, ckpt_dir, storage_type=StorageType.DISK)
        checkpointer.wait_latest_checkpoint()
        checkpointer.save_checkpoint(11, state_dict, os.path.join(checkpoint_dir, "11"),
                                     storage_type=StorageType.MEMORY)
    return _sum(model)


def fsdp_again(checkpoint_dir: str) -> Any:
    import torch.distributed.checkpoint as dist_cp

    from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpShardCheckpointer

    checkpointer = FsdpShardCheckpointer(checkpoint_dir)
    model, sharded = _sharded()
    for p in model.parameters():
        p.data.zero_()
    with sharded:
        state_dict = {"model": model.state_dict()}
        storage_reader = checkpointer.get_storage_reader()
        if storage_reader:
            dist_cp.load_state_dict(state_dict=state_dict, storage_reader=storage_reader)
        model.load_state_dict(state_dict["model"])
    return _sum(model)


class Guide(JobCase):
    def test_ddp(self) -> None:
        saved: List[Any] = self.start(ddp, self.dir)
        self.assertEqual([[saved[0], 11]], self.start(ddp_again, self.dir), self.log)
        self.assertEqual("10", self.text("dlrover_latest.txt"))
        self.assertIn("checkpoint-10.pt", self.visible())

    def test_fsdp(self) -> None:
        import torch

        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 2):
            self.skipTest("THE FSDP EXAMPLE IS NOT TESTED: FSDP without a GPU needs torch 2.2")
        __import__("torch.distributed.fsdp")  # here, and not in each process
        saved: List[Any] = self.start(fsdp, self.dir, ranks=2)
        self.assertEqual(saved, self.start(fsdp_again, self.dir, ranks=2), self.log)
        self.assertIn("10", self.visible())


if __name__ == "__main__":
    unittest.main()
