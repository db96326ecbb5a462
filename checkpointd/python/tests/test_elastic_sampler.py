"""The sampler: what the worlds of an epoch train on, one after the other, is the dataset."""

from __future__ import annotations

import collections
import random
import unittest
from typing import Any, Dict, List, Tuple

from torch.utils.data import DataLoader, DistributedSampler

from dlrover.trainer.torch.elastic._gradients import GradientState
from dlrover.trainer.torch.elastic.dataloader import ElasticDataLoader
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler

LOADER = "dlrover.trainer.torch.elastic.sampler"


class Fresh(unittest.TestCase):
    def setUp(self) -> None:
        GradientState._shared_state.clear()


def world(size: int, ranks: int, state: Dict[str, int] = {}, **options: Any) -> List[ElasticDistributedSampler]:
    samplers = [ElasticDistributedSampler(range(size), ranks, rank, **options) for rank in range(ranks)]
    for s in samplers:
        if state:
            s.load_state_dict(state)
    return samplers


class Worlds(Fresh):
    """Random worlds, each of which ends somewhere within an epoch."""

    def test_nothing_twice_and_nothing_missing(self) -> None:
        for seed in range(300):
            with self.subTest(seed=seed):
                self._epochs(random.Random(seed))

    def _epochs(self, r: random.Random) -> None:
        size = r.randrange(1, 200)
        options = dict(shuffle=r.random() < 0.7, drop_last=r.random() < 0.5, seed=r.randrange(3))
        elastic, state = r.random() < 0.5, {"epoch": 0, "completed_num": 0}
        for epoch in range(2):
            state, seen, ranks = self._epoch(r, size, epoch, state, elastic, options)
            extra = sum(seen.values()) - len(seen)
            missing = size - len(seen)
            if options["drop_last"]:
                self.assertEqual(0, extra, "nothing twice")
                self.assertLess(missing, ranks, "the tail that the last ranks cannot share")
            else:
                self.assertEqual(0, missing)
                self.assertLess(extra, ranks, "what fills up the last ranks")

    def _epoch(self, r: random.Random, size: int, epoch: int, state: Dict[str, int], elastic: bool,
               options: Dict[str, Any]) -> Tuple[Dict[str, int], "collections.Counter[int]", int]:
        seen: "collections.Counter[int]" = collections.Counter()
        for _ in range(r.randrange(4)):  # worlds that end early
            ranks = r.randrange(1, 9)
            state, trained, left = self._run(r, world(size, ranks, state, **options), epoch, elastic, r.randrange(8))
            seen.update(trained)
            if not left:
                return state, seen, ranks
        ranks = r.randrange(1, 9)
        state, trained, _ = self._run(r, world(size, ranks, state, **options), epoch, elastic, 10**6)
        seen.update(trained)
        return state, seen, ranks

    def _run(self, r: random.Random, samplers: List[ElasticDistributedSampler], epoch: int, elastic: bool,
             steps: int) -> Tuple[Dict[str, int], List[int], bool]:
        """One world, for some steps: its checkpoint, what it has trained on, and whether something was left."""
        batch = r.randrange(1, 7)
        kind = ElasticDataLoader if elastic else DataLoader
        loaders = []
        for s in samplers:
            s.set_epoch(epoch)
            loaders.append(iter(kind(range(len(s.dataset)), batch_size=batch, sampler=s)))
        self.assertEqual(1, len({len(s) for s in samplers}), "all ranks have as many samples")
        trained: List[int] = []
        done = 0
        for done in range(steps):
            parts = [next(loader, None) for loader in loaders]
            if parts[0] is None:
                self.assertEqual([None] * len(parts), parts)
                break
            trained += [int(i) for part in parts for i in part]
        else:
            done = steps
        states = [s.state_dict(done, batch) for s in samplers]
        self.assertEqual(states[:1] * len(states), states, "all ranks say the same")
        self.assertEqual(epoch, states[0]["epoch"])
        left = len(samplers[0].dataset) - states[0]["completed_num"]
        return states[0], trained, left >= (len(samplers) if samplers[0].drop_last else 1)


class Place(Fresh):
    def test_order_is_that_of_torch(self) -> None:
        for drop_last in (False, True):
            for size in (0, 1, 7, 12, 100):
                for epoch in (0, 3):
                    options = dict(shuffle=True, seed=5, drop_last=drop_last)
                    for rank in range(3):
                        ours = ElasticDistributedSampler(range(size), 3, rank, **options)
                        theirs = DistributedSampler(range(size), 3, rank, **options)
                        ours.set_epoch(epoch)
                        theirs.set_epoch(epoch)
                        if size:
                            self.assertEqual((list(theirs), len(theirs)), (list(ours), len(ours)))
                        else:
                            self.assertEqual([], list(ours))

    def test_one_rank_without_a_process_group(self) -> None:
        s = ElasticDistributedSampler(range(5), shuffle=False)
        self.assertEqual((1, 0, [0, 1, 2, 3, 4]), (s.num_replicas, s.rank, list(s)))

    def test_loaded_place_counts_for_one_pass(self) -> None:
        """Also for a script that calls no set_epoch, and for one that looks at a batch first."""
        s = ElasticDistributedSampler(range(6), 1, 0, shuffle=False)
        s.load_state_dict({"epoch": 0, "completed_num": 4})
        self.assertEqual(2, len(s))
        self.assertEqual(4, next(iter(s)))
        self.assertEqual([4, 5], list(s))
        self.assertEqual([0, 1, 2, 3, 4, 5], list(s))
        s.load_state_dict({"epoch": 2, "completed_num": 4})
        self.assertEqual((2, 2), (s.epoch, len(s)))
        s.set_epoch(3)
        self.assertEqual((6, 6), (len(s), len(list(s))))

    def test_end_of_an_epoch(self) -> None:
        """Padding counts as nothing, and an epoch that is done has no batch."""
        s = ElasticDistributedSampler(range(10), 3, 0, shuffle=False)
        list(s)
        state = s.state_dict(4, 1)
        self.assertEqual({"epoch": 0, "completed_num": 10}, state)
        again = ElasticDistributedSampler(range(10), 4, 1, shuffle=False)
        again.load_state_dict(state)
        self.assertEqual((0, []), (len(again), list(again)))
        self.assertEqual(state, again.state_dict(0, 1))

    def test_before_the_first_batch(self) -> None:
        s = ElasticDistributedSampler(range(10), 2, 0)
        s.load_state_dict({"epoch": 1, "completed_num": 6})
        self.assertEqual({"epoch": 1, "completed_num": 6}, s.state_dict(0, 4))
        s.set_epoch(2)
        self.assertEqual({"epoch": 2, "completed_num": 0}, s.state_dict(17, 4), "nothing of this epoch")

    def test_state_of_dlrover(self) -> None:
        """It counts the steps of earlier epochs, where scripts do."""
        s = ElasticDistributedSampler(range(10), 2, 0, shuffle=False)
        s.load_state_dict({"epoch": 2, "completed_num": 24})
        self.assertEqual([4, 6, 8], list(s))
        s.load_state_dict({})
        self.assertEqual(5, len(list(s)))
        for bad in ({"epoch": 0, "completed_num": -1}, {"epoch": -1}):
            with self.assertRaisesRegex(ValueError, "must not be negative"):
                s.load_state_dict(bad)

    def test_steps_of_another_loader(self) -> None:
        """They are counted by the script, as it has begun the epoch; more than were handed out are told of once."""
        s = ElasticDistributedSampler(range(100), 2, 0)
        loader = iter(DataLoader(range(100), batch_size=5, sampler=s, num_workers=2))
        for _ in range(3):
            next(loader)
        self.assertEqual(30, s.state_dict(3, 5)["completed_num"], "not what its workers read ahead")
        with self.assertLogs(LOADER, "WARNING") as logs:
            self.assertEqual(70, s.state_dict(1003, 5)["completed_num"])
            s.state_dict(1003, 5)
        self.assertEqual(1, len(logs.output))
        self.assertIn("use ElasticDataLoader", logs.output[0])


class Counted(Fresh):
    """With ElasticDataLoader the sampler knows what the script has got."""

    def loader(self, size: int, state: Dict[str, int] = {}, **options: Any) -> ElasticDataLoader:
        sampler = ElasticDistributedSampler(range(size), 2, 0, shuffle=False)
        if state:
            sampler.load_state_dict(state)
        return ElasticDataLoader(range(size), sampler=sampler, **options)

    def test_whatever_the_script_counts(self) -> None:
        for workers in (0, 2):
            loader = self.loader(100, {"epoch": 0, "completed_num": 20}, batch_size=3, num_workers=workers)
            batches = iter(loader)
            self.assertEqual(14, len(batches))
            for step in range(1, 6):
                next(batches)
                for told in (step, step + 17, 5000):
                    self.assertEqual(20 + 6 * step, loader.sampler.state_dict(told, 3)["completed_num"])
            self.assertEqual(20 + 6 * 4, loader.sampler.state_dict(4, 3)["completed_num"], "the last one is not done")

    def test_after_the_loop(self) -> None:
        loader = self.loader(100, batch_size=7, num_workers=2)
        for _ in range(2):
            for i, _ in enumerate(loader):
                if i == 2:
                    break
            self.assertEqual(42, loader.sampler.state_dict(3, 7)["completed_num"])
        for _ in loader:
            pass
        self.assertEqual(100, loader.sampler.state_dict(8, 7)["completed_num"])

    def test_a_look_at_the_first_batch_within_a_loop(self) -> None:
        for workers in (0, 2):
            loader = self.loader(40, batch_size=4, num_workers=workers)
            for step, batch in enumerate(loader, 1):
                if step == 3:
                    self.assertEqual([0, 2, 4, 6], next(iter(loader)).tolist())
                self.assertEqual(8 * step, loader.sampler.state_dict(step, 4)["completed_num"], (workers, step))
            self.assertEqual(5, step)

    def test_batch_size_that_changes(self) -> None:
        for drop_last in (False, True):
            loader = self.loader(40, batch_size=2, drop_last=drop_last)
            batches = iter(loader)
            first = [len(next(batches)), len(next(batches))]
            loader.update_batch_size(5)
            self.assertEqual(([2, 2], 5), (first, len(next(batches))))
            self.assertEqual(18, loader.sampler.state_dict(3, 2)["completed_num"])
            self.assertEqual([5, 5] + [1] * (not drop_last), [len(b) for b in batches])

    def test_gradients_that_wait(self) -> None:
        """Batches whose gradients no step has taken are trained on again."""
        loader = self.loader(40, batch_size=2)
        state = GradientState()
        state.accumulation_steps = 3
        batches = iter(loader)
        places = []
        for _ in range(7):
            next(batches)
            state.begin(True)
            if state.sync_gradients:
                state.apply()
            places.append(loader.sampler.state_dict(state.num_steps, 2)["completed_num"])
        self.assertEqual([0, 0, 12, 12, 12, 24, 24], places)


if __name__ == "__main__":
    unittest.main()
