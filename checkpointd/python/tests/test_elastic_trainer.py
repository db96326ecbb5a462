"""Steps of ElasticTrainer, and the file from which ElasticDataLoader takes its batch size."""

from __future__ import annotations

import copy
import json
import os
import tempfile
import unittest
from typing import Any, List
from unittest import mock

import torch
from torch.utils.data import DataLoader

from dlrover.trainer.torch.elastic._gradients import GradientState
from dlrover.trainer.torch.elastic.dataloader import ElasticDataLoader
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler
from dlrover.trainer.torch.elastic.trainer import ElasticTrainer
from dlrover.trainer.torch.elastic import trainer as module
from tests.adapters_jobs import JobCase


def _model() -> Any:
    torch.manual_seed(3)
    return torch.nn.Linear(4, 1)


class _Counting(torch.nn.Linear):
    """Tells when gradients are not exchanged."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.entered = 0

    def no_sync(self) -> Any:
        self.entered += 1
        return mock.MagicMock()


class Case(unittest.TestCase):
    def setUp(self) -> None:
        GradientState._shared_state.clear()
        patch = mock.patch.dict(os.environ)
        patch.start()
        self.addCleanup(patch.stop)
        for name in ("WORKER_NUM", "DLROVER_MAX_NODES", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
                     "DLROVER_PARAL_CONFIG_PATH"):
            os.environ.pop(name, None)


class Steps(Case):
    def test_how_many_batches(self) -> None:
        """As close to the largest world's as ranks with the same number each can come."""
        for most, ranks, want in ((1, 1, 1), (4, 4, 1), (4, 2, 2), (4, 1, 4), (4, 3, 1), (3, 2, 2), (8, 5, 2),
                                  (8, 3, 3), (16, 12, 1), (2, 3, 1)):
            self.assertEqual(want, module._accumulation(most, ranks), (most, ranks))

    def test_largest_world(self) -> None:
        for variables, want in (({}, (3, 3)), ({"DLROVER_MAX_NODES": "4", "GROUP_WORLD_SIZE": "3"}, (3, 4)),
                                ({"DLROVER_MAX_NODES": "6", "LOCAL_WORLD_SIZE": "1"}, (3, 6)),
                                ({"WORKER_NUM": "2", "DLROVER_MAX_NODES": "6", "GROUP_WORLD_SIZE": "1"}, (3, 6)),
                                ({"DLROVER_MAX_NODES": "2", "GROUP_WORLD_SIZE": "2"}, (3, 3)),
                                ({"DLROVER_MAX_NODES": "1", "GROUP_WORLD_SIZE": "3"}, (3, 3))):
            with mock.patch.dict(os.environ, variables), mock.patch.object(module, "dist") as dist:
                dist.get_world_size.return_value = 3
                self.assertEqual(want, module._ranks(), variables)
        os.environ["DLROVER_MAX_NODES"] = "two"
        with self.assertRaisesRegex(ValueError, "DLROVER_MAX_NODES=two: need a whole number"):
            ElasticTrainer(_model()).prepare(torch.optim.SGD(_model().parameters(), lr=1))

    def trainer(self, batches: int, model: Any, lr: float = 0.5) -> Any:
        os.environ.update(DLROVER_MAX_NODES=str(batches), GROUP_WORLD_SIZE="1")
        trainer = ElasticTrainer(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        return trainer, trainer.prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5))

    def test_accumulates(self) -> None:
        """Like one step on all batches together, wherever the script sets gradients to zero."""
        x, y = torch.randn(12, 4), torch.randn(12, 1)
        want = _model()
        optimizer = torch.optim.SGD(want.parameters(), lr=0.5)
        for step in range(2):
            optimizer.param_groups[0]["lr"] = 0.5 ** (step + 2)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(want(x[6 * step:6 * step + 6]), y[6 * step:6 * step + 6]).backward()
            optimizer.step()
        for first in (True, False):
            model = _model()
            trainer, (optimizer, scheduler) = self.trainer(3, model)
            scheduler.step()  # as some scripts do before each epoch
            steps = []
            for i in range(0, 12, 2):
                with trainer.step(fix_total_batch_size=True):
                    if first:
                        optimizer.zero_grad()
                    loss = torch.nn.functional.mse_loss(model(x[i:i + 2]), y[i:i + 2])
                    (loss / trainer.gradient_accumulation_steps).backward()
                    optimizer.step()
                    scheduler.step()
                    if not first:
                        optimizer.zero_grad()
                    steps.append(trainer.num_steps)
            self.assertEqual([0, 0, 1, 1, 1, 2], steps)
            self.assertEqual([0.5 ** 4], scheduler.get_last_lr())
            torch.testing.assert_close(model.weight, want.weight)
            trainer.reset()
            self.assertEqual(0, trainer.num_steps)

    def test_each_batch_is_a_step_unless_the_size_is_fixed(self) -> None:
        model = _Counting()
        trainer, (optimizer, _) = self.trainer(3, model)
        before = model.weight.item()
        for fixed, steps, unsynced in ((False, 1, 0), (False, 2, 0), (True, 2, 1), (True, 2, 2), (True, 3, 2)):
            with trainer.step(fixed):
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            self.assertEqual((steps, unsynced), (trainer.num_steps, model.entered))
        self.assertNotEqual(before, model.weight.item())

    def test_gradients_that_are_not_finite(self) -> None:
        """The scaler does not step; the batch is done all the same."""
        trainer, _ = self.trainer(1, _model())
        with trainer.step():
            self.assertEqual(0, trainer.num_steps)
        self.assertEqual((1, 0), (trainer.num_steps, trainer.gradient_state.pending))

    def test_a_batch_that_fails(self) -> None:
        trainer, (_, scheduler) = self.trainer(1, _model())
        with self.assertRaisesRegex(RuntimeError, "bad batch"), trainer.step():
            raise RuntimeError("bad batch")
        self.assertEqual((0, 1), (trainer.num_steps, trainer.gradient_state.pending))

    def test_optimizer_is_the_other_one(self) -> None:
        model = _model()
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer = ElasticTrainer(model).prepare(inner)
        self.assertIsInstance(optimizer, torch.optim.Optimizer)
        self.assertIs(inner.param_groups, optimizer.param_groups)
        self.assertIs(inner.state, optimizer.state)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
        self.assertEqual(0.05, inner.param_groups[0]["lr"])
        state = optimizer.state_dict()
        self.assertEqual(1, int(state["state"][0]["step"]))
        optimizer.load_state_dict(state)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        self.assertEqual(2, len(inner.param_groups))
        self.assertEqual(2, len(copy.deepcopy(inner).param_groups))

    def test_place_that_goes_into_the_checkpoint(self) -> None:
        """The order of DLRover's example for MNIST: the step of a batch counts within its context."""
        model = _model()
        trainer, (optimizer, _) = self.trainer(2, model)
        data = torch.randn(20, 4)
        sampler = ElasticDistributedSampler(data, 1, 0, shuffle=False)
        loader = ElasticDataLoader(data, batch_size=2, sampler=sampler)
        places = []
        for batch in loader:
            with trainer.step(True):
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
                places.append(sampler.state_dict(trainer.num_steps, loader.batch_size)["completed_num"])
        self.assertEqual([0, 4, 4, 8, 8, 12, 12, 16, 16, 20], places)

    def test_names_without_a_place_here(self) -> None:
        for name in ("TrainingRecord", "find_free_port", "get_rank"):
            with self.assertRaisesRegex(ImportError, "is not part of dlrover-run: "):
                getattr(module, name)


class _Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(5))


def _ddp(batches: List[int]) -> List[float]:
    """Each rank's part of every global batch of 4; returns the weights."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(DLROVER_MAX_NODES="4", GROUP_WORLD_SIZE=str(size))
    model = torch.nn.parallel.DistributedDataParallel(_model())
    trainer = ElasticTrainer(model)
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(16, 4, generator=generator)
    sampler = ElasticDistributedSampler(data, shuffle=False)
    for batch in ElasticDataLoader(data, batch_size=1, sampler=sampler):
        with trainer.step(fix_total_batch_size=True):
            loss = (model(batch) ** 2).mean() / trainer.gradient_accumulation_steps
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert trainer.num_steps == 4 and sampler.num_replicas == size and sampler.rank == rank
    return [float(w) for w in model.module.weight.flatten()]


class Ranks(JobCase):
    def test_fewer_ranks_train_the_same(self) -> None:
        four, two = self.start(_ddp, [], ranks=4), self.start(_ddp, [], ranks=2)
        for weights in four + two:
            torch.testing.assert_close(weights, four[0])


class Config(Case):
    def setUp(self) -> None:
        super().setUp()
        self.path = os.path.join(tempfile.mkdtemp(prefix="dlrover-test-"), "config.json")
        self.addCleanup(os.rmdir, os.path.dirname(self.path))

    def write(self, text: Any) -> None:
        if not os.path.exists(self.path):
            self.addCleanup(os.unlink, self.path)
        with open(self.path, "w") as f:
            f.write(text if isinstance(text, str) else json.dumps({"dataloader": text}))

    def sizes(self, loader: Any) -> List[int]:
        return [len(batch) for batch in loader]

    def test_file(self) -> None:
        os.environ["DLROVER_PARAL_CONFIG_PATH"] = self.path
        loader = ElasticDataLoader(range(12), batch_size=4)
        self.assertEqual([4, 4, 4], self.sizes(loader), "there is no file yet")
        self.write({"version": 1, "batch_size": 6})
        self.assertEqual([6, 6], self.sizes(loader))
        self.write({"version": 1, "batch_size": 3})
        self.assertEqual([6, 6], self.sizes(loader), "not a newer version")
        self.write({"version": 2, "batch_size": 3})
        batches = iter(loader)
        self.write({"version": 3, "batch_size": 12})
        self.assertEqual([3, 3, 3, 3], self.sizes(batches), "a pass keeps its size")
        self.assertEqual(3, loader.get_batch_size())
        loader.update_batch_size()
        self.assertEqual((12, 1), (loader.get_batch_size(), len(loader)))
        self.assertEqual(4, ElasticDataLoader(range(12), batch_size=4, config_file="/nowhere").get_batch_size())

    def test_argument_comes_before_the_variable(self) -> None:
        os.environ["DLROVER_PARAL_CONFIG_PATH"] = "/nowhere"
        self.write({"version": 1, "batch_size": 6})
        self.assertEqual(6, ElasticDataLoader(range(12), batch_size=4, config_file=self.path).get_batch_size())

    def test_bad_files(self) -> None:
        for text in ("", "{", "[]", '{"dataloader": 3}', '{"dataloader": {"version": 1, "batch_size": "x"}}', "\xff",
                     '{"dataloader": {"version": null}}', " " * (1 << 20) + "{}"):
            self.write(text)
            with self.assertLogs("dlrover.trainer.torch.elastic.dataloader", "WARNING") as logs:
                loader = ElasticDataLoader(range(12), batch_size=4, config_file=self.path)
            self.assertIn("is not a configuration of DLRover's", logs.output[0])
            self.assertEqual(4, loader.get_batch_size())
        os.unlink(self.path)
        os.mkfifo(self.path)
        with self.assertLogs("dlrover.trainer.torch.elastic.dataloader", "WARNING") as logs:
            ElasticDataLoader(range(12), batch_size=4, config_file=self.path)
        self.assertIn("not a regular file", logs.output[0])

    def test_sizes_that_scripts_set(self) -> None:
        loader = ElasticDataLoader(range(12), batch_size=4)
        self.assertEqual((4, 4), (loader.batch_size, loader.get_batch_size()))
        loader.set_batch_size(5)
        self.assertEqual([5, 5, 2], self.sizes(loader))
        for bad in (-1, 1.5, "4", True):
            with self.assertRaisesRegex(ValueError, "need a whole number from 1 on"):
                loader.set_batch_size(bad)
        with self.assertRaisesRegex(ValueError, "batch_size=None"):
            ElasticDataLoader(range(12), batch_size=None).update_batch_size(3)

    def test_everything_else_is_torch(self) -> None:
        own = torch.utils.data.BatchSampler(range(6), 2, False)
        self.assertEqual([2, 2, 2], self.sizes(ElasticDataLoader(range(6), batch_sampler=own)))
        loader = ElasticDataLoader(range(6), batch_size=2, num_workers=2, persistent_workers=True,
                                   sampler=ElasticDistributedSampler(range(6), 2, 1, shuffle=False))
        for _ in range(2):
            self.assertEqual([[1, 3], [5]], [b.tolist() for b in loader])
        self.assertEqual([[0, 1], [2, 3], [4]], [b.tolist() for b in ElasticDataLoader(_Stream(), batch_size=2)])
        plain = DataLoader(range(6), batch_size=4)
        self.assertEqual([b.tolist() for b in plain], [b.tolist() for b in ElasticDataLoader(range(6), batch_size=4)])


if __name__ == "__main__":
    unittest.main()
