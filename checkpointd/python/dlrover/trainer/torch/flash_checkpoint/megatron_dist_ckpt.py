"""Flash checkpoints for Megatron-LM with data parallel optimizers; see the module megatron for how it is done.

The functions differ from those of the module megatron in their arguments, and in that load_checkpoint always returns
(iteration, num_floating_point_operations_so_far). The files are Megatron's in both cases.
"""

from __future__ import annotations

import os

from dlrover.python.common import storage as _storage
from dlrover.python.common.storage import get_checkpoint_storage
from dlrover_ckpt.engine import StorageType

from . import megatron

__all__ = ["StorageType", "KeepLatestStepStrategy", "KeepStepIntervalStrategy", "get_checkpoint_storage",
           "save_checkpoint", "load_checkpoint", "wait_latest_checkpoint"]

wait_latest_checkpoint = megatron.wait_latest_checkpoint


class KeepStepIntervalStrategy(_storage.KeepStepIntervalStrategy):
    """Keeps the newest checkpoint and those whose iteration is a multiple of keep_interval."""

    def _path(self, step):
        return os.path.join(self._checkpoint_dir, "iter_%07d" % step)


class KeepLatestStepStrategy(_storage.KeepLatestStepStrategy):
    """Keeps the newest max_to_keep checkpoints, at least one."""

    def _path(self, step):
        return os.path.join(self._checkpoint_dir, "iter_%07d" % step)


def save_checkpoint(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far=0,
                    storage_type=StorageType.DISK, comm_backend="", deletion_strategy=None, save_timeout=600,
                    replica_count=0, storage=None, **megatron_args):
    """Saves a checkpoint to memory, or to memory and then to disk in the background; all ranks call it.

    deletion_strategy is a CheckpointDeletionStrategy; the one of storage is used when it is None. The rest is as
    in the module megatron.
    """
    return megatron.save(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far,
                         storage_type, megatron_args,
                         deletion_strategy=deletion_strategy or _storage.deletion_strategy_of(storage),
                         save_timeout=save_timeout, replica_count=replica_count)


def load_checkpoint(model, optimizer, opt_param_scheduler, load_arg="load", strict=True, comm_backend="",
                    deletion_strategy=None, save_timeout=600, replica_count=0, storage=None, **megatron_args):
    """Loads the newest checkpoint, from memory if it is there; all ranks call it.

    Returns (iteration, num_floating_point_operations_so_far), with 0 for what this version of Megatron does not count.
    """
    result = megatron.load(model, optimizer, opt_param_scheduler, load_arg, strict, megatron_args,
                           deletion_strategy=deletion_strategy or _storage.deletion_strategy_of(storage),
                           save_timeout=save_timeout, replica_count=replica_count)
    return result if isinstance(result, tuple) else (result, 0)
