"""Data shards: the arithmetic, and clients that share a store."""

from __future__ import annotations

import collections
import json
import os
import random
import threading
import unittest
from datetime import timedelta
from typing import Any, Dict, List
from unittest import mock

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from dlrover.python.elastic_agent.sharding import _plan, client
from dlrover.python.elastic_agent.sharding.client import IndexShardingClient, ShardingClient


def records(data: _plan.Dataset, shard: Any) -> List[int]:
    return data.indices(shard) or list(range(shard.start, shard.end))


class Arithmetic(unittest.TestCase):
    def test_order(self) -> None:
        for size in list(range(1, 70)) + [255, 256, 257, 1000]:
            order = _plan.Order("seed", size)
            self.assertEqual(list(range(size)), sorted(order[i] for i in range(size)), size)
        same, other = _plan.Order("a 1", 50), _plan.Order("a 2", 50)
        self.assertEqual([35, 26, 12, 29, 49], [same[i] for i in range(5)], "it is in checkpoints: it never changes")
        self.assertNotEqual([same[i] for i in range(50)], [other[i] for i in range(50)])
        self.assertLess(_plan.Order("x", 10**15)[10**15 - 1], 10**15)

    def test_random_histories(self) -> None:
        """However often a job starts again, and with whatever sizes: every record once in each epoch."""
        for seed in range(400):
            with self.subTest(seed=seed):
                self._history(random.Random(seed))

    def _history(self, r: random.Random) -> None:
        size, epochs, shuffle, text = r.randrange(60), r.randrange(1, 4), r.random() < 0.6, r.random() < 0.5
        data = _plan.Dataset("d", size, r.randrange(1, 12), epochs, shuffle, text)
        plan, seen = _plan.Plan(data, []), collections.Counter()  # type: ignore
        for last in (False, False, False, True):
            total = plan.total()
            handed = total if last else r.randrange(total + 3)
            done = {n for n in range(handed) if last or r.random() < 0.6}
            for n in done:
                shard = plan.at(n)
                self.assertEqual(n >= total, shard is None)
                seen.update(records(data, shard) if shard else [])
            data = data._replace(shard=r.randrange(1, 12))
            left = plan.after(handed, done.__contains__)
            self.assertEqual(total - len([n for n in done if n < total]), left.total())
            plan = _plan.Plan.load(data, left.dump())
        self.assertEqual({i: epochs for i in range(size)}, dict(seen))
        self.assertEqual((0, None), (plan.total(), plan.at(0)))

    def test_without_end(self) -> None:
        data = _plan.Dataset("d", 10, 4, 0, False, False)
        plan = _plan.Plan(data, []).after(100, lambda n: n != 7)
        self.assertEqual((None, [(4, 8, None), (4, 8, None), (8, 10, None)]),
                         (plan.total(), [plan.at(n) for n in range(3)]))
        self.assertEqual((0, None), (_plan.Plan(data._replace(size=0), []).total(),
                                     _plan.Plan(data._replace(size=0), []).at(0)))

    def test_what_dlrover_has_written(self) -> None:
        data = _plan.Dataset("d", 10, 4, 2, False, True)
        plan = _plan.Plan.load(data, json.dumps({"dataset_name": "d", "todo": [[8, 10]], "doing": [[0, 2, [7, 3]]],
                                                 "epoch": 1, "splitter": None}))
        self.assertEqual([[7, 3], [8, 9], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]],
                         [records(data, plan.at(n)) for n in range(plan.total())])

    def test_bad_checkpoints(self) -> None:
        data = _plan.Dataset("d", 10, 4, 2, False, True)
        good: Dict[str, Any] = {"dataset_name": "d", "todo": [], "doing": [[0, 4]], "epoch": 1, "next": 1}
        self.assertEqual(3, _plan.Plan.load(data, json.dumps(good)).total())
        for change in ({"doing": [[0, 11]]}, {"doing": [[4, 4]]}, {"doing": [[-1, 2]]}, {"doing": [[0, 2, [1]]]},
                       {"doing": [[0, 2, [1, 10]]]}, {"doing": [[0, 2, "x"]]}, {"doing": [[0]]}, {"doing": 7},
                       {"epoch": None}, {"epoch": -1}, {"epoch": True}, {"epoch": 1e3}, {"next": "1"}, {"next": 4},
                       {"todo": None}, {"shard_size": -4}, {"dataset_name": "e"}, {"dataset_size": 9},
                       {"shuffle": True}, {"text": False}):
            with self.subTest(change), self.assertRaises(ValueError) as caught:
                _plan.Plan.load(data, json.dumps(dict(good, **change)))
            self.assertNotIn("\n", str(caught.exception))
        for text in ("", "{", "[]", "7", "null", "[" * 100000):
            with self.assertRaisesRegex(ValueError, "this is not a checkpoint of shards of 10 records"):
                _plan.Plan.load(data, text)


    def test_damaged_checkpoints(self) -> None:
        """Whatever is in one: it is refused, or a plan of records that are there."""
        r = random.Random(1)
        data = _plan.Dataset("d", 10, 4, 2, True, True)
        good = _plan.Plan(data, []).after(4, lambda n: n == 1).dump()
        for _ in range(3000):
            text = bytearray(good.encode())
            for _ in range(r.randrange(1, 4)):
                at = r.randrange(len(text))
                text[at:at + r.randrange(3)] = r.choice([b"", b"1", b"-", b"[", b"]", b"9" * 20, b"null", b"\xff", b","])
            try:
                plan = _plan.Plan.load(data, bytes(text))
            except ValueError:
                continue
            shards = [plan.at(n) for n in range(min(plan.total(), 100))]
            self.assertTrue(all(0 <= i < 10 for s in shards if s for i in records(data, s)), text)


class Store:
    """PyTorch's HashStore, whose release 1.13 crashes under threads: one request at a time, as a server has them."""

    def __init__(self) -> None:
        self._store, self._lock = dist.HashStore(), threading.Lock()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def locked(*args: Any) -> Any:
            with self._lock:
                return call(*args)

        return locked


class Clients(unittest.TestCase):
    """The ranks of a job are clients with one store; a start of the workers is a name that the launcher gives it."""

    def setUp(self) -> None:
        self.store = Store()
        patches = [mock.patch.object(client, "_connect", lambda pid: self.store), mock.patch.dict(os.environ)]
        for patch in patches:
            patch.start()
            self.addCleanup(patch.stop)
        self.start("1.1.1")

    def start(self, name: str) -> None:
        os.environ["DLROVER_CKPT_EPOCH"] = name

    def ranks(self, n: int, **options: Any) -> List[ShardingClient]:
        return [ShardingClient(**dict(dict(dataset_name="d", batch_size=2, num_epochs=1, dataset_size=100,
                                           num_minibatches_per_shard=2), **options)) for _ in range(n)]

    def take(self, c: ShardingClient, shards: int = 10**6, done: bool = True) -> List[int]:
        """Fetches shards, trains on their batches, and returns the records of those."""
        taken: List[int] = []
        for _ in range(shards):
            shard = c.fetch_shard()
            if shard is None:
                break
            numbers = shard.indices or list(range(shard.start, shard.end))
            taken += numbers
            for i in range(0, len(numbers), 2) if done else ():
                c.report_batch_done(len(numbers[i:i + 2]))
        return taken

    def test_shared_among_ranks(self) -> None:
        for i, options in enumerate(({}, {"shuffle": True}, {"shuffle": True, "storage_type": "text"})):
            a, b = self.ranks(2, dataset_name="d%d" % i, num_epochs=2, **options)
            first = self.take(a, 3) + self.take(b, 4)
            self.assertEqual(28, len(set(first)))
            if i == 0:
                self.assertEqual(list(range(28)), first)
            seen = collections.Counter(first + self.take(a, 20) + self.take(b))
            self.assertEqual({n: 2 for n in range(100)}, dict(seen))
            self.assertIsNone(a.fetch_shard())

    def test_at_the_same_time(self) -> None:
        clients = self.ranks(4, dataset_size=2000, num_minibatches_per_shard=5)
        seen: List[List[int]] = [[] for _ in clients]
        threads = [threading.Thread(target=lambda i=i: seen[i].extend(self.take(clients[i])))  # type: ignore
                   for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        self.assertEqual(list(range(2000)), sorted(sum(seen, [])))
        self.assertEqual(0, clients[0]._shared.left().total())

    def test_checkpoint(self) -> None:
        """What others work at is not done."""
        a, b = self.ranks(2)
        trained = self.take(a, 3)
        self.take(b, 2, done=False)
        state = a.get_shard_checkpoint()
        self.assertEqual(([[12, 16], [16, 20]], 0, 5),
                         tuple(json.loads(state)[k] for k in ("doing", "epoch", "next")))
        self.take(a, 7)
        self.store = Store()
        for c in self.ranks(3):
            self.assertTrue(c.restore_shard_from_checkpoint(state), "each rank may restore it")
            trained += self.take(c, 4)
        self.assertEqual(list(range(12 + 48)), sorted(trained))
        self.take(c, 1, done=False)
        self.assertTrue(c.restore_shard_from_checkpoint(state), "the second time it goes back")
        self.assertEqual([12, 13, 14, 15], self.take(c, 1))
        with self.assertRaisesRegex(ValueError, "not a checkpoint of shards"):
            c.restore_shard_from_checkpoint("{}")

    def test_one_rank_restores(self) -> None:
        a, b = self.ranks(2)
        self.take(b, 2)
        self.store = Store()
        a, c = self.ranks(2)
        a.restore_shard_from_checkpoint(b.get_shard_checkpoint())
        self.assertEqual(list(range(8, 100)), sorted(self.take(c, 5) + self.take(a)))

    def test_workers_that_start_again(self) -> None:
        """The launcher keeps the store's keys; those who had shards do not come back."""
        a, b = self.ranks(2)
        trained = self.take(a, 70) + self.take(b, 1)
        a, b = self.ranks(2, dataset_name="e", dataset_size=1000)
        trained = self.take(a, 70)
        lost = self.take(b, 2, done=False)
        for start, ranks in (("1.1.2", 3), ("1.2.1", 1)):
            self.start(start)
            clients = self.ranks(ranks, dataset_name="e", dataset_size=1000)
            for c in clients:
                trained += self.take(c, 20)
            self.assertEqual(set(), set(lost) - set(trained))
            self.take(clients[0], 3, done=False)
        self.start("2.1.1")
        trained += self.take(self.ranks(1, dataset_name="e", dataset_size=1000)[0])
        self.assertEqual(list(range(1000)), sorted(trained))

    def test_earlier_starts_leave_nothing(self) -> None:
        keys = []
        for start in range(4):
            self.start("1.1.%d" % start)
            a, = self.ranks(1, dataset_size=2000)
            self.take(a, 100)
            for _ in range(2):
                a.restore_shard_from_checkpoint(a.get_shard_checkpoint())
                self.take(a, 5, done=False)
            keys.append(self.store.num_keys())
        self.assertEqual(keys[1:], [keys[1]] * 3)

    def test_plan_that_does_not_come(self) -> None:
        """The rank that was to make it is gone."""
        self.store.add("dlrover_shards/d/1.1.1/claim", 1)
        with mock.patch.object(client, "_WAIT", timedelta(milliseconds=20)):
            with self.assertRaisesRegex(TimeoutError, "dataset d: the rank that was the first to ask has not told"):
                self.ranks(1)

    def test_start_that_is_cut_off(self) -> None:
        """Wherever a rank is killed while it makes the plan of its start, the next start knows what is left."""
        for n in range(1, 12):
            self.store = Store()
            self.start("1.1.1")
            trained = self.take(self.ranks(1)[0], 10)
            self.start("1.1.2")
            self.store = _Cut(self.store, n)
            try:
                self.ranks(1)
            except _Killed:
                pass
            self.store = self.store.store
            self.start("1.1.3")
            self.assertEqual(list(range(100)), trained + self.take(self.ranks(1)[0]), n)

    def test_sizes_that_change(self) -> None:
        """Where the world changes, so may the batch size; among the ranks of one the first one's counts."""
        trained = self.take(self.ranks(1, num_epochs=3)[0], 30)
        self.start("1.2.0")
        a, b = self.ranks(1, num_epochs=3, batch_size=5)[0], None
        with self.assertLogs(client.__name__, "WARNING") as logs:
            b, = self.ranks(1, num_epochs=3, batch_size=7, shuffle=True)
        self.assertIn("another rank was the first and has 100 records in shards of 10 for 3 epochs, shuffle=False",
                      logs.output[0])
        trained += self.take(b, 9) + self.take(a, 3)
        self.start("1.2.1")
        trained += self.take(self.ranks(1, num_epochs=3, batch_size=3)[0])
        self.assertEqual({n: 3 for n in range(100)}, dict(collections.Counter(trained)))

    def test_batches_that_are_done(self) -> None:
        a, = self.ranks(1, num_minibatches_per_shard=3)
        self.assertFalse(a.report_batch_done(), "of nothing")
        self.assertIsNone(a.get_current_task())
        first, second = a.get_task(), a.get_task()
        self.assertEqual((6, 1, "d"), (first.shard.end, first.type, first.shard.name))
        self.assertIs(first, a.get_current_task())
        self.assertEqual([False, False, True], [a.report_batch_done() for _ in range(3)])
        self.assertIs(second, a.get_current_task())
        self.assertEqual([False, True], [a.report_batch_done(n) for n in (5, 2)])
        third, fourth = a.get_task(), a.get_task()
        self.assertTrue(a.report_batch_done(6, task_ids=[fourth.task_id]))
        self.assertIs(third, a.get_current_task())
        self.assertEqual((50, 100), (a.get_minibatch_count_per_epoch(), a.get_total_sample_num()))

    def test_batches_that_fail(self) -> None:
        a, = self.ranks(1, dataset_size=8)
        with self.assertLogs(client.__name__, "ERROR") as logs:
            for _ in range(4):
                self.assertEqual(0, a.fetch_shard().start)
                self.assertTrue(a.report_batch_done(4, err_msg="bad records"))
        self.assertIn("records 0 to 3 of dataset d have failed 4 times and are left out: bad records", logs.output[0])
        self.assertEqual(4, a.fetch_shard().start)
        self.assertFalse(a.report_batch_done(2, err_msg="its first half"))
        self.assertTrue(a.report_batch_done(2))
        self.assertEqual(4, a.fetch_shard().start, "it has failed")
        a.report_all_task_error("bad")
        self.assertEqual([4, 5, 6, 7], self.take(a))
        self.assertEqual(0, a._shared.left().total())

    def test_reset(self) -> None:
        a, b = self.ranks(2, dataset_size=8)
        self.take(a, 2)
        self.assertIsNone(b.fetch_shard())
        for c in (a, b):
            c.reset_dataset()
        self.assertEqual([list(range(4)), list(range(4, 8))], [self.take(b, 1), self.take(a)])

    def test_bad_arguments(self) -> None:
        for change, text in (({"batch_size": 0}, "batch_size=0: need a whole number from 1 on"),
                             ({"dataset_size": -1}, "dataset_size=-1: need"), ({"dataset_name": ""}, "1 to 1024"),
                             ({"num_minibatches_per_shard": 2.5}, "num_minibatches_per_shard=2.5")):
            with self.assertRaisesRegex(ValueError, text):
                self.ranks(1, **change)

    def test_records_of_several_processes(self) -> None:
        for workers, context in ((0, None), (2, "fork"), (2, "spawn")):
            data = _Records(IndexShardingClient("i%d%s" % (workers, context), 4, 2, 30, num_minibatches_per_shard=1))
            loader = DataLoader(data, batch_size=4, num_workers=workers, multiprocessing_context=context)
            seen = [int(i) for batch in loader for i in batch]
            self.assertEqual(sorted(2 * list(range(30))), sorted(seen))
            with self.assertRaises(StopIteration):
                data.client.fetch_sample_index()

    def test_records_one_by_one(self) -> None:
        a = IndexShardingClient("d", 2, 1, 10, num_minibatches_per_shard=1)
        self.assertEqual([0, 1, 2], [a.fetch_sample_index() for _ in range(3)])
        state = a.get_shard_checkpoint()
        self.assertTrue(a.report_batch_done())
        self.assertEqual([[2, 4]], json.loads(a.get_shard_checkpoint())["doing"])
        a.restore_shard_from_checkpoint(state)
        self.assertEqual([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [a.fetch_sample_index() for _ in range(10)])
        with self.assertRaises(StopIteration):
            a.fetch_sample_index()
        a._stop(0)
        self.assertTrue(a._server.is_alive(), "the end of a fork is not its end")
        a._stop(os.getpid())
        self.assertFalse(a._server.is_alive())

    def test_store_that_fails(self) -> None:
        a = IndexShardingClient("d", 2, 1, 10)
        with mock.patch.object(a, "_store") as store:
            store.compare_set.side_effect = RuntimeError("Connection reset")
            with self.assertLogs(client.__name__, "ERROR") as logs:
                for _ in range(2):
                    with self.assertRaisesRegex(RuntimeError, "cannot be fetched: Connection reset"):
                        a.fetch_sample_index()
        self.assertIn("the shards of dataset d cannot be fetched: Connection reset", logs.output[0])


class _Killed(BaseException):
    pass


class _Cut:
    """A store that its client can use n times."""

    def __init__(self, store: Any, n: int) -> None:
        self.store, self.left = store, n

    def __getattr__(self, name: str) -> Any:
        self.left -= 1
        if self.left < 0:
            raise _Killed
        return getattr(self.store, name)


class _Records(Dataset):
    def __init__(self, c: IndexShardingClient) -> None:
        self.client = c

    def __len__(self) -> int:
        return 60

    def __getitem__(self, _: int) -> int:
        return self.client.fetch_sample_index()


class Connection(unittest.TestCase):
    def setUp(self) -> None:
        client._connect.cache_clear()
        self.addCleanup(client._connect.cache_clear)

    def test_store_of_the_launcher(self) -> None:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        with mock.patch.dict(os.environ, env):
            a, b = (ShardingClient("d", 2, 1, 40, num_minibatches_per_shard=10) for _ in range(2))
            self.assertEqual([0, 20, None], [s and s.start for s in (a.fetch_shard(), b.fetch_shard(), a.fetch_shard())])
            self.assertIs(a._store, b._store)
            client._connect.cache_clear()
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            with self.assertRaisesRegex(RuntimeError, "call init_process_group before"):
                ShardingClient("d", 2, 1, 40)

    def test_one_process_alone(self) -> None:
        with mock.patch.dict(os.environ):
            os.environ.pop("MASTER_ADDR", None)
            self.assertEqual(0, ShardingClient("d", 2, 1, 40).fetch_shard().start)


if __name__ == "__main__":
    unittest.main()
