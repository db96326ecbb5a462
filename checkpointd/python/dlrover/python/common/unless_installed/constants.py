"""The constants that checkpoints need. Where DLRover is installed, its own module is found before this one."""

from __future__ import annotations

from typing import Any


class CheckpointConstant:
    TRACER_FILE_NAME = "dlrover_latest.txt"
    MODEL_STATES_NAME = "model_states"
    OPTIM_STATES_NAME = "optim_states"
    SAVE_TIMEOUT = 600  # seconds


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    raise ImportError("%s.%s: dlrover-run brings CheckpointConstant only; the other constants need pip install dlrover"
                      % (__name__, name))
