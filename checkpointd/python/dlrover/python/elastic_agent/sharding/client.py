"""Hands out shards of a dataset to the next rank that asks, as DLRover's master does.

The ranks do it among themselves, with counters in the store that the launcher of rank 0 serves to them.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import multiprocessing
import os
import struct
import threading
import time
from collections import OrderedDict, deque
from datetime import timedelta
from typing import Any, Deque, Dict, Iterator, List, Optional

from dlrover.python.elastic_agent.sharding import _plan

_log = logging.getLogger(__name__)
_KEYS = "dlrover_shards/"  # the launcher keeps keys with this prefix when it restarts the workers
_BITS = 62  # of a counter, each added once
_RETRIES = 3
_NAME = 1024  # characters
_WAIT = timedelta(minutes=5)
TRAINING = 1  # a task type of DLRover's
_WISH, _STOP = b"w", b"s"
_RECORD = struct.Struct("=q")  # a number, or
_NO_MORE, _FAILED = -1, -2
_PATIENCE = 5  # seconds


class Shard:
    """Records start to end - 1 of the dataset, or those that indices names, if it is not empty."""

    def __init__(self, name: str, start: int, end: int, indices: List[int]) -> None:
        self.name, self.start, self.end, self.indices = name, start, end, indices


class Task:
    """A shard that this process works at."""

    def __init__(self, task_id: int, shard: Shard, type: Any, plan: "_Shared") -> None:
        self.task_id, self.shard, self.type, self.plan, self.failures = task_id, shard, type, plan, 0
        self.error = ""  # that has reported a batch


class _Shared:
    """A plan in the store: how many of its shards were handed out, and which are done."""

    def __init__(self, store: Any, name: str, plan: _plan.Plan) -> None:
        self.store, self.name, self.plan = store, name, plan
        self._whole = 0  # blocks of _BITS shards that are known to be done

    def hand_out(self) -> int:
        return self.store.add(self.name + "/next", 1) - 1

    def handed_out(self) -> int:
        n, total = self.store.add(self.name + "/next", 0), self.plan.total()
        return n if total is None else min(n, total)

    def done(self, n: int) -> None:
        block, bit = divmod(n, _BITS)
        self.store.add("%s/done/%d" % (self.name, block), 1 << bit)

    def left(self) -> _plan.Plan:
        handed = self.handed_out()
        blocks: Dict[int, int] = {}
        for b in range(self._whole, -(-handed // _BITS)):
            blocks[b] = self.store.add("%s/done/%d" % (self.name, b), 0)
            if b == self._whole and blocks[b] == (1 << _BITS) - 1:
                self._whole += 1
        return self.plan.after(handed, lambda n: n // _BITS not in blocks or bool(blocks[n // _BITS] >> n % _BITS & 1))


@functools.lru_cache(maxsize=1)
def _connect(pid: int) -> Any:
    """The store of the workers, by one connection for all clients of a process. It is not that of the process group, in
    which other calls block; no call blocks in it."""
    import torch.distributed as dist

    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        return dist.HashStore()  # there is no other rank
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and not dist.is_initialized():
        raise RuntimeError("data shards need the store that rank 0 serves: call init_process_group before")
    return dist.TCPStore(address, int(port), is_master=False, timeout=_WAIT, wait_for_workers=False)


class ShardingClient:
    """Fetches shards, and reports when their records were trained on.

        client = ShardingClient(dataset_name="train", batch_size=64, num_epochs=1, dataset_size=10000)
        while True:
            shard = client.fetch_shard()
            if not shard:
                break
            for batch in read(shard.start, shard.end):
                train(batch)
                client.report_batch_done()

    A shard that was fetched and is not done is handed out again when the workers restart; so are the shards of
    get_shard_checkpoint's result, after restore_shard_from_checkpoint.
    """

    def __init__(self, dataset_name: str, batch_size: int, num_epochs: int, dataset_size: int, shuffle: bool = False,
                 task_type: Any = TRAINING, num_minibatches_per_shard: int = 10, storage_type: str = "") -> None:
        if not isinstance(dataset_name, str) or not 0 < len(dataset_name) <= _NAME:
            raise ValueError("dataset_name=%.100r: need a text of 1 to %d characters" % (dataset_name, _NAME))
        for name, value, least in (("batch_size", batch_size, 1), ("dataset_size", dataset_size, 0),
                                   ("num_minibatches_per_shard", num_minibatches_per_shard, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError("%s=%r: need a whole number from %d on" % (name, value, least))
        self._data = _plan.Dataset(dataset_name, dataset_size, batch_size * num_minibatches_per_shard, num_epochs or 0,
                                   bool(shuffle), storage_type == "text")
        self._batch_size = batch_size
        self._task_type = task_type
        self._lock = threading.RLock()
        self._pending: "OrderedDict[int, Task]" = OrderedDict()
        self._reported: Dict[int, int] = {}  # records of them that are done
        self._failed: Deque[Task] = deque()
        self._restores = 0
        self._store = _connect(os.getpid())
        self._name = _KEYS + dataset_name
        self._begin = os.environ.get("DLROVER_CKPT_EPOCH") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
        self._shared = self._agree("%s/%s" % (self._name, self._begin), self._left_by_others)

    def _agree(self, name: str, plan: Any) -> _Shared:
        """The plan of this name; the first caller makes it, and the others take that."""
        if self._store.add(name + "/claim", 1) == 1:
            made, before = plan(), self._current()
            self._store.set(name + "/plan", json.dumps({"data": self._data[1:], "plan": made.dump()}))
            self._store.set(self._name + "/current", name)  # a process that ends before this has changed nothing
            self._store.set(name + "/ready", "1")
            if before and self._parts(before)[0] != self._begin:
                self._remove(before)
            return _Shared(self._store, name, made)
        self._wait(name + "/ready")
        made = self._load(self._read(name + "/plan"))
        if made.data != self._data:
            _log.warning("dataset %s: another rank was the first and has %s, which counts, and not %s", *(
                [self._data.name] + ["%d records in shards of %d for %d epochs, shuffle=%s, text=%s" % tuple(d[1:])
                                     for d in (made.data, self._data)]))
            self._data = made.data
        return _Shared(self._store, name, made)

    def _wait(self, key: str) -> None:
        end, pause = time.monotonic() + _WAIT.total_seconds(), 0.001
        while time.monotonic() < end:
            if self._read(key):
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        raise TimeoutError("dataset %s: the rank that was the first to ask has not told in %s which shards there are" %
                           (self._data.name, _WAIT))

    def _load(self, text: bytes) -> _plan.Plan:
        state = json.loads(text)
        return _plan.Plan.load(_plan.Dataset(self._data.name, *state["data"]), state["plan"])

    def _left_by_others(self) -> _plan.Plan:
        """The unfinished shards of earlier workers, if the store still has their plan."""
        before = self._current()
        text = self._read(before + "/plan") if before else b""
        if not text:
            return _plan.Plan(self._data, [])
        left = _Shared(self._store, before, self._load(text)).left()
        _log.info("dataset %s goes on in epoch %d, with %d shards that were not done", self._data.name, left.epoch,
                  len(left.left))
        return _plan.Plan.load(self._data, left.dump())  # the sizes may be others now

    def _parts(self, plan: str) -> "tuple[str, int]":
        """The start of the workers that a plan belongs to, and the number of earlier plans in it."""
        start, _, restores = plan[len(self._name) + 1:].partition("/")
        return start, int(restores or 0)

    def _remove(self, last: str) -> None:
        """Removes the entries of an earlier start from the store, up to its last plan."""
        start, restores = self._parts(last)
        for n in range(restores + 1):
            name = "%s/%s" % (self._name, start) + ("/%d" % n if n else "")
            for block in range(self._store.add(name + "/next", 0) // _BITS + 1):
                self._store.delete_key("%s/done/%d" % (name, block))
            for key in ("/plan", "/next", "/claim", "/ready"):
                self._store.delete_key(name + key)

    def _current(self) -> str:
        return self._read(self._name + "/current").decode()

    def _read(self, key: str) -> bytes:
        """The value of a key; it need not be there, and is empty then."""
        return self._store.compare_set(key, "", "")

    def _refresh(self) -> _Shared:
        """The present plan: another rank may have restored one."""
        name = self._current()
        if name != self._shared.name:
            self._shared = self._agree(name, lambda: _plan.Plan(self._data, []))
            self._forget()
        return self._shared

    def _forget(self) -> None:
        self._pending.clear()
        self._reported.clear()
        self._failed.clear()

    def get_task(self) -> Optional[Task]:
        with self._lock:
            shared = self._refresh()
            task = self._failed.popleft() if self._failed else self._next(shared)
            if task:
                self._pending[task.task_id] = task
            return task

    def _next(self, shared: _Shared) -> Optional[Task]:
        n = shared.hand_out()
        s = shared.plan.at(n)
        if s is None:
            return None
        return Task(n, Shard(self._data.name, s.start, s.end, self._data.indices(s)), self._task_type, shared)

    def fetch_shard(self) -> Optional[Shard]:
        """The next shard; None: there is none left."""
        task = self.get_task()
        return task.shard if task else None

    def get_current_task(self) -> Optional[Task]:
        """The shard whose records are reported next."""
        with self._lock:
            return next(iter(self._pending.values()), None)

    def report_batch_done(self, batch_size: Optional[int] = None, err_msg: str = "",
                          task_ids: Optional[List[int]] = None) -> bool:
        """Some records were trained on, the oldest shards' first. Returns whether that finished a shard. A shard
        reported with err_msg has failed: this process gets it again, up to three times."""
        with self._lock:
            records, finished = batch_size or self._batch_size, False
            for n in list(task_ids or self._pending):
                task = self._pending.get(n)
                if task is None or records <= 0:
                    continue
                task.error = task.error or err_msg
                size, had = task.shard.end - task.shard.start, self._reported.pop(n, 0)
                if had + records < size:
                    self._reported[n] = had + records
                    break
                records -= size - had
                self._report_task(task, task.error)
                finished = True
            return finished

    def _report_task(self, task: Task, err_msg: str = "") -> None:
        self._pending.pop(task.task_id, None)
        if not err_msg:
            task.plan.done(task.task_id)
            return
        task.failures, task.error = task.failures + 1, ""
        if task.failures <= _RETRIES:
            self._failed.append(task)
            return
        _log.error("records %d to %d of dataset %s have failed %d times and are left out: %s", task.shard.start,
                   task.shard.end - 1, self._data.name, task.failures, err_msg)
        task.plan.done(task.task_id)

    def report_all_task_error(self, err_msg: str) -> None:
        with self._lock:
            for task in list(self._pending.values()):
                self._report_task(task, err_msg)
            self._reported.clear()

    def get_shard_checkpoint(self) -> str:
        """The unfinished shards of all ranks, for the checkpoint of the model."""
        with self._lock:
            return self._refresh().left().dump()

    def restore_shard_from_checkpoint(self, shard_checkpoint: str) -> bool:
        """Continues with those shards. One rank or all of them may call it, before the first shard is fetched. If only
        one does, the others have to wait for it, with a barrier."""
        plan = _plan.Plan.load(self._data, shard_checkpoint)
        with self._lock:
            self._restart(lambda: plan)
        return True

    def reset_dataset(self) -> None:
        """Begins with the first epoch. As with a restore, the ranks that do it for the n-th time do it together."""
        with self._lock:
            self._restart(lambda: _plan.Plan(self._data, []))

    def _restart(self, plan: Any) -> None:
        self._restores += 1
        self._shared = self._agree("%s/%s/%d" % (self._name, self._begin, self._restores), plan)
        self._forget()

    def get_minibatch_count_per_epoch(self) -> int:
        return self._data.size // self._batch_size

    def get_total_sample_num(self) -> int:
        return self._data.size * self._data.epochs


class IndexShardingClient(ShardingClient):
    """Fetches records one by one; the processes of a DataLoader may share it."""

    def __init__(self, dataset_name: str, batch_size: int, num_epochs: int, dataset_size: int, shuffle: bool = False,
                 task_type: Any = TRAINING, num_minibatches_per_shard: int = 10, storage_type: str = "",
                 num_workers: int = 1) -> None:
        super().__init__(dataset_name, batch_size, num_epochs, dataset_size, shuffle, task_type,
                         num_minibatches_per_shard, storage_type)
        # Pipes and no queues: these go to processes that are forked and to others, and need neither locks nor semaphores.
        self._asked, self._ask = multiprocessing.Pipe(duplex=False)
        self._answers, self._answer = multiprocessing.Pipe(duplex=False)
        self._failure = ""
        self._server = threading.Thread(target=self._serve, name="fetch_sample_indices", daemon=True)
        self._server.start()
        atexit.register(self._stop, os.getpid())

    def __getstate__(self) -> Dict[str, Any]:  # for processes that are not forked
        return {"_ask": self._ask, "_answers": self._answers, "_failure": ""}

    def _stop(self, pid: int) -> None:
        """Ends the thread before the interpreter does: within the store's code that would abort the process."""
        if pid != os.getpid():
            return  # a fork, which has no such thread and shares the pipes
        os.write(self._ask.fileno(), _STOP)
        self._server.join(_PATIENCE)

    def _serve(self) -> None:
        """Answers each wish for a record. A shard is fetched when its first one is wished for, not before: other ranks
        could have it meanwhile."""
        task: Optional[Task] = None
        records: Iterator[int] = iter(())
        while os.read(self._asked.fileno(), 1) == _WISH:
            try:
                record = next(records, None) if task and task.plan is self._shared else None
                if record is None:
                    task = self.get_task()
                    records = iter(task.shard.indices or range(task.shard.start, task.shard.end)) if task else iter(())
                    record = next(records, _NO_MORE)
            except Exception as e:
                self._failure, record = str(e), _FAILED
                _log.error("the shards of dataset %s cannot be fetched: %s", self._data.name, e)
            os.write(self._answer.fileno(), _RECORD.pack(record))

    def fetch_sample_index(self) -> int:
        """The number of the next record; StopIteration: there is none left."""
        os.write(self._ask.fileno(), _WISH)
        # Readers get whole numbers: so few bytes are written, and read, at once.
        record, = _RECORD.unpack(os.read(self._answers.fileno(), _RECORD.size))
        if record == _NO_MORE:
            raise StopIteration
        if record == _FAILED:
            raise RuntimeError("the shards of the dataset cannot be fetched: %s" %
                               (self._failure or "the error is in the log of this process's parent"))
        return record

    def clear_shard_queue(self) -> None:
        """There is nothing to clear: records are fetched when they are asked for."""
