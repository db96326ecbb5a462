"""A loader whose batch size may change while it is used, and that reports its batches to ElasticDistributedSampler."""

from __future__ import annotations

import itertools
import json
import logging
import os
import stat
import weakref
from typing import Any, Iterator, List, Optional

from torch.utils.data import BatchSampler, DataLoader

_log = logging.getLogger(__name__)
_CONFIG = "DLROVER_PARAL_CONFIG_PATH"  # names the file, where DLRover's auto-tuning writes one
_MOST = 1 << 20  # bytes of it


class _Batches(BatchSampler):
    """Asks for its size before each batch."""

    def __iter__(self) -> Iterator[List[int]]:
        indices, current = iter(self.sampler), None
        while True:
            batch = list(itertools.islice(indices, self.batch_size))
            if not batch or (self.drop_last and len(batch) < self.batch_size):
                return
            if current is None:  # the sampler has begun this pass with the first index; another one may begin later
                current = getattr(self.sampler, "current", None)
            if current is not None:
                current.drawn.append(len(batch))
            yield batch


class _Counted:
    """The iterator of a loader; it reports each batch to the sampler.

    outer is the iterator that was used before. If it is still in use when this one is gone, as after a look at the
    first batch within a loop, the sampler's place is that of outer again.
    """

    def __init__(self, batches: Any, sampler: Any, outer: Optional["_Counted"]) -> None:
        self._batches, self._sampler = batches, sampler
        self._outer = weakref.ref(outer) if outer is not None else None
        self._pass: Any = None

    def __del__(self) -> None:
        outer = self._outer() if self._outer is not None else None
        if outer is not None and outer._pass is not None and self._sampler.current is self._pass:
            self._sampler.current = outer._pass

    def __iter__(self) -> "_Counted":
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        batch = next(self._batches)
        if self._pass is None:
            self._pass = self._sampler.current
        self._pass.take()
        self._sampler.current = self._pass
        return batch


class ElasticDataLoader(DataLoader):
    """Torch's DataLoader.

    A batch size in the file config_file, or in the one that DLROVER_PARAL_CONFIG_PATH names, counts from the next
    pass on: within one the ranks might read it at different steps, and have different numbers of batches.
    """

    def __init__(self, *args: Any, config_file: Optional[str] = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.batch_size is not None:  # the batch sampler is torch's, which refuses to have it set
            self.__dict__["batch_sampler"] = _Batches(self.sampler, self.batch_size, self.drop_last)
        self._config_version = 0
        self._used: Any = lambda: None  # a weak reference to the iterator that was made last
        self.config_file = config_file or os.environ.get(_CONFIG, "")
        self.load_config()

    def __iter__(self) -> Any:
        self.load_config()
        batches = super().__iter__()
        counts = hasattr(self.sampler, "current") and isinstance(self.batch_sampler, _Batches)
        if not counts:
            return batches
        counted = _Counted(batches, self.sampler, self._used())
        self._used = weakref.ref(counted)
        return counted

    def load_config(self, config_file: Optional[str] = None) -> None:
        """Takes the batch size of a file, if its version is newer than the one that was taken last."""
        path = config_file or self.config_file
        try:
            settings = json.loads(_read(path)).get("dataloader", {}) if path else {}
            version, size = int(settings.get("version", 0)), int(settings.get("batch_size", 0))
        except FileNotFoundError:
            return
        except (OSError, ValueError, AttributeError, TypeError) as e:
            _log.warning("%s is not a configuration of DLRover's, the batch size stays: %s", path, e)
            return
        if version <= self._config_version:
            return
        self._config_version = version
        if size > 0 and size != self.get_batch_size():
            self.set_batch_size(size)
            _log.info("the batch size is %d, by version %d of %s", size, version, path)

    def update_batch_size(self, batch_size: Optional[int] = None) -> None:
        """Sets the size of the batches that are drawn from now on; without one it is read from the file."""
        if batch_size:
            self.set_batch_size(batch_size)
        else:
            self.load_config()

    def set_batch_size(self, batch_size: int) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError("batch size %r: need a whole number from 1 on" % (batch_size,))
        if self.batch_sampler is None:
            raise ValueError("batch size %d: this loader has batch_size=None, which makes no batches" % batch_size)
        self.batch_sampler.batch_size = batch_size

    def get_batch_size(self) -> Optional[int]:
        return getattr(self.batch_sampler, "batch_size", None)


def _read(path: str) -> bytes:
    """A file that another process replaces: a regular one, to a bound."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as f:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is not a regular file")
        data = f.read(_MOST + 1)
    if len(data) > _MOST:
        raise ValueError("it has more than %d bytes" % _MOST)
    return data
