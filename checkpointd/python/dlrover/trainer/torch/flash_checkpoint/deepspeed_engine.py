"""DLRover's engine for DeepSpeed; see the module engine."""

from __future__ import annotations

from .engine import CheckpointEngine

__all__ = ["DeepSpeedCheckpointEngine"]


class DeepSpeedCheckpointEngine(CheckpointEngine):
    """Saves the files of DeepSpeed; ``latest`` gets the name of their directory. global_shard_num and zero_stage are
    accepted for compatibility: each rank contributes what it has."""

    framework = "deepspeed"

    def __init__(self, checkpoint_dir, storage, global_shard_num=1, zero_stage=0, comm_backend="",
                 save_timeout=600) -> None:
        self.global_shard_num = global_shard_num
        self.zero_stage = zero_stage
        super().__init__(checkpoint_dir, storage, comm_backend, save_timeout)

    def _trackers(self, step, files):
        return [("latest", files[0].split("/")[0])] if files and "/" in files[0].lstrip("/") else []
