"""A sampler whose place in an epoch is part of the checkpoint, for any number of ranks."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Deque, Dict, Iterator, Optional

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from dlrover.trainer.torch.elastic._gradients import GradientState

_log = logging.getLogger(__name__)
_REMEMBERED = 4096  # sizes of batches, more than one step of an optimizer takes


class Pass:
    """One pass of this rank over an epoch, or over the rest of it."""

    def __init__(self, epoch: int, start: int) -> None:
        self.epoch = epoch
        self.start = start  # samples of the epoch that all ranks together had done before
        self.handed = 0  # samples that this rank's loader has got
        self.counted = False  # a loader says which of these the script has got
        self.drawn: Deque[int] = deque()  # sizes of batches that the loader works at
        self.taken: Deque[int] = deque(maxlen=_REMEMBERED)  # sizes of those that the script has got, the last ones
        self.batches = self.samples = 0  # that the script has got

    def take(self) -> None:
        """The script gets the next batch of those that were drawn."""
        self.counted = True
        size = self.drawn.popleft()
        self.taken.append(size)
        self.batches += 1
        self.samples += size


class ElasticDistributedSampler(DistributedSampler):
    """Torch's DistributedSampler, with the same order, that can continue within an epoch with other ranks.

    The ranks take the samples of an epoch in turn, so after each step the samples done by all ranks are the beginning
    of its order. The checkpoint has the length of that; the ranks that load it share the rest.
    """

    def __init__(self, dataset: Any, num_replicas: Optional[int] = None, rank: Optional[int] = None,
                 shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            num_replicas, rank = num_replicas or 1, rank or 0
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self._resume: Optional[Dict[str, int]] = None  # a place that was loaded, until that epoch ends
        self.current: Optional[Pass] = None
        self._warned = False

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._measure()

    def __iter__(self) -> Iterator[int]:
        start = self._measure()
        left = len(self.dataset) - start
        places = torch.arange(self.num_samples) * self.num_replicas + self.rank
        places = places % max(left, 1) + start  # the last ranks get the first samples again, unless drop_last
        if self.shuffle:
            g = torch.Generator()
            g.manual_seed(self.seed + self.epoch)
            places = torch.randperm(len(self.dataset), generator=g)[places]
        current = self.current = Pass(self.epoch, start)
        for index in places.tolist():
            current.handed += 1
            yield index
        if self._resume and self._resume["epoch"] == current.epoch:
            self._resume = None  # the next pass is a whole one, even if set_epoch is never called

    def _start(self) -> int:
        return self._resume["completed_num"] if self._resume and self._resume["epoch"] == self.epoch else 0

    def _measure(self) -> int:
        """Sets the lengths of the next pass, and returns where it starts."""
        start = self._start()
        left = len(self.dataset) - start
        self.num_samples = left // self.num_replicas
        if left % self.num_replicas and not self.drop_last:
            self.num_samples += 1
        self.total_size = self.num_samples * self.num_replicas
        return start

    def state_dict(self, iter_step: int, micro_batch_size: int) -> Dict[str, int]:
        """The place in the epoch, for the checkpoint.

        With an ElasticDataLoader it is that of the batches that the script has got, without those whose gradients
        ElasticTrainer has not applied. iter_step then only tells whether the last batch is done. With another loader
        iter_step is the number of batches that are done since this process has begun this epoch.
        """
        p = self.current
        if p is None or p.epoch != self.epoch:
            return {"completed_num": self._start(), "epoch": self.epoch}
        done = self._counted(p, iter_step) if p.counted else self._told(p, iter_step, micro_batch_size)
        return {"completed_num": min(p.start + done * self.num_replicas, len(self.dataset)), "epoch": self.epoch}

    @staticmethod
    def _counted(p: Pass, iter_step: int) -> int:
        state = GradientState()
        undone = state.pending
        if state.accumulation_steps == 1 and iter_step == p.batches - 1:
            undone = 1  # the script has got a batch and has not trained on it yet
        return p.samples - sum(list(p.taken)[-undone:]) if undone else p.samples

    def _told(self, p: Pass, steps: int, size: int) -> int:
        done = steps * size
        if done >= p.handed + size and not self._warned:  # the last batch may be a smaller one
            self._warned = True
            _log.warning("state_dict tells of %d samples of epoch %d, but this process has handed out %d: count steps "
                         "from where this process has begun the epoch, or use ElasticDataLoader, which counts itself",
                         done, self.epoch, p.handed)
        return min(done, p.handed)

    def load_state_dict(self, state: Dict[str, int]) -> None:
        epoch, completed, size = int(state.get("epoch", 0)), int(state.get("completed_num", 0)), len(self.dataset)
        if completed < 0 or epoch < 0:
            raise ValueError("sampler state %r: epoch and completed_num must not be negative" % (state,))
        if completed > size:  # DLRover counts the steps of earlier epochs, too
            completed %= max(size, 1)
        self._resume, self.current = {"epoch": epoch, "completed_num": completed}, None
        self.set_epoch(epoch)
        _log.info("the sampler goes on in epoch %d after %d of %d samples, with %d for each of %d ranks",
                  epoch, completed, size, self.num_samples, self.num_replicas)
