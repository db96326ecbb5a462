"""FlashCkptTrainer: a transformers.Trainer whose checkpoints go through shared memory.

transformers (4.37 or newer) is imported when the class is first asked for.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Tuple

from dlrover.python.common.storage import (CheckpointDeletionStrategy, CheckpointStorage, KeepLatestStepStrategy,
                                           PosixDiskStorage)
from dlrover_ckpt import sync
from dlrover_ckpt.adapter import Capture, Checkpointer, Found, module_with, names_replaced
from dlrover_ckpt.engine import StorageType
from dlrover_ckpt.image import Image, raw, torch_zip
from dlrover_ckpt.safetensors_image import safetensors_image

from ._lacking import lacking, with_native
from .deepspeed import AsyncCheckpointAgent
from .deepspeed_engine import DeepSpeedCheckpointEngine
from .engine import CheckpointEngine
from .full_ckpt_engine import FullCheckpointEngine

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer

    from ._types import Path
else:
    _Trainer = object  # until FlashCkptTrainer is made

__all__ = ["FlashCkptTrainer", "StorageType", "HfFlashCheckpointer", "HfDdpCheckpointer", "HfDeepSpeedCheckpointer",
           "AsyncCheckpointAgent", "CheckpointEngine", "DeepSpeedCheckpointEngine", "FullCheckpointEngine",
           "PosixDiskStorage"]

_PREFIX = "checkpoint-"  # the name of checkpoints in transformers
_others = with_native(lacking(__name__, {}))


def __getattr__(name: str) -> Any:
    if name != "FlashCkptTrainer":
        return _others(name)
    from transformers import Trainer, TrainerCallback

    class FlashCkptTrainer(_FlashCkptTrainer, Trainer):
        __doc__ = _FlashCkptTrainer.__doc__

    class AfterStep(_AfterStep, TrainerCallback):
        pass

    FlashCkptTrainer.__module__ = __name__
    FlashCkptTrainer._after_step = AfterStep
    return globals().setdefault(name, FlashCkptTrainer)


class _FlashCkptTrainer(_Trainer):
    """A transformers.Trainer that saves its checkpoints into shared memory and from there to disk.

    A checkpoint-<step> directory has the files that Trainer would have written, and appears complete or not at all.
    Training waits only for the copy into memory. For a single process, DDP, PEFT and DeepSpeed; ValueError for FSDP and
    for save_on_each_node.

    resume_from_checkpoint=True resumes from the newest checkpoint, from memory if it is there. With save_total_limit,
    old checkpoints are deleted when a newer one is committed. With push_to_hub, training waits for the files as well.

    drop_superseded = True, set in a subclass or before train(): a save may take the place of an older one that waits
    for the disk, when there is no room for both; else training waits.
    """

    drop_superseded = False
    _after_step: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._flash: Dict[str, Checkpointer] = {}
        self._stage = ""  # while a checkpoint is being taken: where Trainer writes its files
        self._best_step: Optional[int] = None  # the best model is in this save, which may not be on disk yet
        super().__init__(*args, **kwargs)
        if self.is_fsdp_enabled:
            raise ValueError("FlashCkptTrainer does not support FSDP: use FsdpShardCheckpointer")
        if getattr(self.args, "save_on_each_node", False):
            raise ValueError("FlashCkptTrainer writes one checkpoint for all nodes: set save_on_each_node=False")

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        with self._resumable(resume_from_checkpoint) as directory:
            return super().train(directory, *args, **kwargs)

    def get_last_checkpoint(self) -> Any:
        """The directory of the newest complete checkpoint on disk, a string; False if there is none."""
        top = str(self.args.output_dir)
        steps = [sync.tracked(top)] + [m["step"] for m in sync.manifests(top)[0]]
        for step in steps:  # Trainer itself may have deleted the newest, after it has loaded the best
            directory = os.path.join(top, "%s%d" % (_PREFIX, step or 0))
            if step and os.path.isdir(directory):
                return directory
        return False

    def wait_latest_checkpoint(self, timeout: float = 1800) -> None:
        """Waits, at most timeout seconds, until the newest save is durable. TimeoutError: it is not by then.
        RuntimeError: it never will be, and why."""
        for checkpointer in self._flash.values():
            checkpointer.engine.wait(timeout=timeout)

    # Saving

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        run_dir = os.path.abspath(super()._get_output_dir(trial))
        checkpointer = self._checkpointer(run_dir)
        step = int(self.state.global_step)
        if self._best_step is not None:  # a newer save could take its place before it is on disk
            checkpointer.engine.wait(self._best_step)
            self._best_step = None
        with tempfile.TemporaryDirectory(prefix="dlrover-hf-") as stage:
            os.mkdir(os.path.join(stage, "%s%d" % (_PREFIX, step)))
            caught = _Caught(stage)
            self._stage = stage
            try:
                with caught.saving(self):
                    super()._save_checkpoint(model, trial, *args, **kwargs)
            finally:
                self._stage = ""
                self._correct_best(stage, run_dir, step)
            checkpointer.engine.save(step, caught.images, StorageType.DISK)

    def _get_output_dir(self, trial: Any) -> str:
        return self._stage or super()._get_output_dir(trial)

    def _correct_best(self, stage: str, run_dir: str, step: int) -> None:
        """The best checkpoint is not in the stage, where Trainer believes it is."""
        best = self.state.best_model_checkpoint
        if not best or not best.startswith(stage):
            return
        self.state.best_model_checkpoint = os.path.join(run_dir, os.path.relpath(best, stage))
        self._best_step = step
        path = os.path.join(best, "trainer_state.json")
        if os.path.exists(path):
            self.state.save_to_json(path)

    def _checkpointer(self, run_dir: str) -> Checkpointer:
        if run_dir not in self._flash:
            self._flash[run_dir] = Checkpointer(run_dir, "hf", deletion_strategy=self._rotation(run_dir),
                                                drop_superseded=self.drop_superseded)
        return self._flash[run_dir]

    def _rotation(self, run_dir: str) -> Optional[CheckpointDeletionStrategy]:
        limit = self.args.save_total_limit
        if not limit or limit <= 0:
            return None
        if self.args.metric_for_best_model is None:
            return KeepLatestStepStrategy(limit, run_dir)
        return _KeepBest(limit, run_dir, lambda: self.state.best_model_checkpoint or "")

    # Loading

    def _load_best_model(self) -> None:
        self.wait_latest_checkpoint()
        _barrier()
        super()._load_best_model()

    @contextlib.contextmanager
    def _resumable(self, asked: Any) -> Iterator[Any]:
        """The directory to resume from; a checkpoint in memory gets one for as long as it is read."""
        found = self._find(asked) if asked else None
        if found is None:
            yield asked
        elif found.loaded.source == "disk":
            yield os.path.join(found.loaded.dir, "%s%d" % (_PREFIX, found.loaded.step))
        else:
            with _on_tmpfs(found, self._checkpointer(found.loaded.dir)) as directory:
                after = self._after_step(lambda: _remove(directory))
                self.add_callback(after)
                try:
                    yield directory
                finally:
                    self.remove_callback(after)

    def _find(self, asked: Any) -> Optional[Found]:
        """The checkpoint that resume_from_checkpoint=asked selects; None: Trainer decides."""
        run_dir = os.path.abspath(str(self.args.output_dir))
        name = os.path.relpath(os.path.abspath(asked), run_dir) if asked is not True else ""
        if name and not re.fullmatch(_PREFIX + r"\d+", name):
            return None
        checkpointer = self._checkpointer(run_dir)
        found = checkpointer.find(lambda step, names: names if _local_rank() == 0 else [])
        if found is None or name and name != "%s%d" % (_PREFIX, found.loaded.step):
            return None
        if found.loaded.source == "memory" and not _everyone(_room_for(found)):
            found = checkpointer.find(lambda step, names: [], "disk")
        return found


if TYPE_CHECKING:
    FlashCkptTrainer = _FlashCkptTrainer


class _HfEngine(CheckpointEngine):
    framework = "hf"


class HfFlashCheckpointer:
    """Saves the state of a trainer of the caller's own, through ckpt_agent.save, one checkpoint at a time.

        checkpointer.ckpt_agent.save(model.state_dict(), os.path.join(directory, "checkpoint-5", "pytorch_model.bin"))
        checkpointer.save_checkpoint_to_storage(5)

    All ranks make one, and all make the same calls. FlashCkptTrainer does not use it.
    """

    def __init__(self, checkpoint_dir: Path, storage: Optional[CheckpointStorage] = None) -> None:
        self.checkpoint_dir = checkpoint_dir
        self.storage = storage or PosixDiskStorage()
        self.ckpt_agent = AsyncCheckpointAgent(self.storage)
        self.async_save_engine: Optional[CheckpointEngine] = None

    def save_checkpoint_to_memory(self, step: int) -> bool:
        """Saves to memory: when it returns, the save survives the process. False: it was skipped, the log says why."""
        return self._engine().save_to_memory(step, *self._of(step))

    def save_checkpoint_to_storage(self, step: int) -> bool:
        """Saves to memory and then to disk in the background. False: it was skipped, the log says why."""
        return self._engine().save_to_storage(step, *self._of(step))

    def _engine(self) -> CheckpointEngine:
        if self.async_save_engine is None:
            raise ValueError("HfFlashCheckpointer has no engine: use HfDdpCheckpointer or HfDeepSpeedCheckpointer")
        return self.async_save_engine

    def _of(self, step: int) -> Tuple[Dict[str, Any], Dict[str, str]]:
        """The agent's files of this step. A file that only an earlier step had is still there under its old path."""
        agent, top = self.ckpt_agent, "%s%d" % (_PREFIX, step)
        stale = [name for name, path in agent.paths.items() if re.search("/%s[0-9]+/" % _PREFIX, path)
                 and "/%s/" % top not in path]
        for name in stale:
            agent.state_dict.pop(name, None)
            del agent.paths[name]
        return agent.state_dict, agent.paths


class HfDdpCheckpointer(HfFlashCheckpointer):
    """For models whose every rank has the full state."""

    def __init__(self, checkpoint_dir: Path, storage: Optional[CheckpointStorage] = None,
                 comm_backend: str = "") -> None:
        super().__init__(checkpoint_dir, storage)
        self.async_save_engine = _HfEngine(checkpoint_dir, self.storage, comm_backend)


class HfDeepSpeedCheckpointer(HfFlashCheckpointer):
    """For a DeepSpeedEngine."""

    def __init__(self, engine: Any, checkpoint_dir: Path, storage: Optional[CheckpointStorage] = None,
                 comm_backend: str = "") -> None:
        super().__init__(checkpoint_dir, storage)
        self.engine = engine
        self.async_save_engine = _HfEngine(checkpoint_dir, self.storage, comm_backend)


class _Caught:
    """The files of a checkpoint, intercepted on their way to the stage. Other files are written there."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._objects = Capture(stage)
        self._weights: Dict[str, Any] = {}

    @contextlib.contextmanager
    def saving(self, trainer: Any) -> Iterator[None]:
        """Intercepts the saves of Trainer during the block."""
        if trainer.args.push_to_hub:  # it sends files
            yield
            return
        import sys

        modules = [sys.modules[name] for name in (
            "transformers.trainer", "transformers.modeling_utils", "peft.peft_model", "peft.utils.save_and_load")
            if name in sys.modules]
        replaced: Dict[str, Callable[[Any], Any]] = {
            "torch": lambda torch: module_with(torch, save=self._objects.save),
            "safe_save_file": self._catch,
            "safetensors": lambda package: module_with(
                package, torch=module_with(package.torch, save_file=self._catch(package.torch.save_file)))}
        with names_replaced(modules, replaced), self._deepspeed(trainer):
            yield

    def _catch(self, save_file: Callable[..., Any]) -> Callable[..., None]:
        def caught(tensors: Dict[str, Any], filename: Any, metadata: Any = None) -> None:
            path = self._objects.path_in(filename)
            if path is None:
                save_file(tensors, filename, metadata)
            else:
                self._weights[path] = (dict(tensors), metadata)

        return caught

    @contextlib.contextmanager
    def _deepspeed(self, trainer: Any) -> Iterator[None]:
        if not trainer.is_deepspeed_enabled:
            yield
            return
        from .deepspeed import _Saving

        engine = trainer.model_wrapped
        own = engine.checkpoint_engine
        engine.checkpoint_engine = _Saving(own, self._objects)
        try:
            yield
        finally:
            engine.checkpoint_engine = own

    def images(self) -> List[Image]:
        weights = [safetensors_image(_final(path), tensors, notes)
                   for path, (tensors, notes) in sorted(self._weights.items())]
        objects = [torch_zip(_final(path), obj) for path, obj in sorted(self._objects.files.items())]
        return weights + objects + list(self._files())

    def _files(self) -> Iterator[Image]:
        for directory, _, names in sorted(os.walk(self._stage)):
            for name in sorted(names):
                path = os.path.join(directory, name)
                with open(path, "rb") as f:
                    yield raw(_final(os.path.relpath(path, self._stage)), f.read())


def _final(path: str) -> str:
    """The name of a file in the checkpoint; transformers 4.37 and 4.38 write to a tmp-checkpoint-<step> first."""
    return path[len("tmp-"):] if path.startswith("tmp-" + _PREFIX) else path


class _KeepBest(CheckpointDeletionStrategy):
    """Keeps the newest checkpoints and the best, as save_total_limit asks for."""

    def __init__(self, limit: int, run_dir: str, best: Callable[[], str]) -> None:
        self._limit = limit
        self._run_dir = run_dir
        self._best = best

    def clean_up(self, step: int, delete_func: Callable[[str], None]) -> None:
        steps = sorted(m["step"] for m in sync.manifests(self._run_dir)[0])
        best = os.path.basename(self._best())
        others = [s for s in steps if "%s%d" % (_PREFIX, s) != best]
        room = max(1, self._limit - (len(steps) - len(others)))
        for old in others[:-room]:
            delete_func(os.path.join(self._run_dir, "%s%d" % (_PREFIX, old)))


class _AfterStep:
    """Calls a function after the first optimizer step: by then all ranks have read the checkpoint that they resume
    from."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Optional[Callable[[], None]] = call

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


# Checkpoints in memory, shown as files to a Trainer that can only read files.


@contextlib.contextmanager
def _on_tmpfs(found: Found, checkpointer: Checkpointer) -> Iterator[str]:
    """A directory with the files; local rank 0 of each node makes it for all its ranks."""
    top = ""
    if _local_rank() == 0:
        top = tempfile.mkdtemp(prefix="hf-", dir=getattr(checkpointer.engine, "_runtime", "") or None)
    try:
        if top:
            _write(found, top)
        found.loaded.files.clear()
        tops = _gather(top)
        yield os.path.join(tops[_rank() - _local_rank()], "%s%d" % (_PREFIX, found.loaded.step))
    finally:
        if top:
            shutil.rmtree(top, ignore_errors=True)


def _write(found: Found, top: str) -> None:
    for path, view in found.loaded.files.items():
        full = os.path.join(top, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "wb") as f:
            f.write(view)


def _room_for(found: Found) -> bool:
    need = sum(len(view) for view in found.loaded.files.values())
    return _local_rank() != 0 or shutil.disk_usage("/dev/shm").free > need + need // 10


def _remove(directory: str) -> None:
    if _local_rank() == 0:
        shutil.rmtree(os.path.dirname(directory), ignore_errors=True)


def _distributed() -> bool:
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized())


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if _distributed() else 0


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0")) if _distributed() else 0


def _gather(value: Any) -> List[Any]:
    import torch.distributed as dist

    if not _distributed():
        return [value]
    values: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _everyone(yes: bool) -> bool:
    return all(_gather(yes))


def _barrier() -> None:
    _gather(None)
