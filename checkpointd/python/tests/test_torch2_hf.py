"""FlashCkptTrainer against the stock Trainer: the same directories, and a resumed run like an undisturbed one."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import unittest
from typing import Any, Dict, List

from tests import torch2_ranks as ranks


def setUpModule() -> None:
    ranks.need("transformers", "accelerate", "safetensors")


class _Data:
    """Sentences of numbers."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> Dict[str, Any]:
        import torch

        ids = (torch.arange(8) * (i + 3)) % 31
        return {"input_ids": ids, "labels": ids}


def _gpt(dtype: str = "float32", lora: bool = False) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config).to(getattr(torch, dtype))
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM"))


def _arguments(directory: str, **more: Any) -> Any:
    from transformers import TrainingArguments

    settings = dict(output_dir=directory, per_device_train_batch_size=2, max_steps=6, save_steps=2, report_to=[],
                    learning_rate=1e-2, use_cpu=True, disable_tqdm=True, logging_steps=1, seed=3)
    settings.update(more)
    return TrainingArguments(**settings)


def _trainer(flash: bool, directory: str, dtype: str = "float32", lora: bool = False, **more: Any) -> Any:
    import transformers

    if flash:
        from dlrover.trainer.torch.flash_checkpoint.hf_trainer import FlashCkptTrainer as Trainer
    else:
        from transformers import Trainer
    transformers.logging.set_verbosity_error()
    data = _Data()
    return Trainer(model=_gpt(dtype, lora), args=_arguments(directory, **more), train_dataset=data, eval_dataset=data)


def _weights(trainer: Any) -> str:
    import hashlib

    import torch

    digest = hashlib.sha256()
    for _, p in sorted(trainer.accelerator.unwrap_model(trainer.model).named_parameters()):
        digest.update(bytes(p.detach().contiguous().view(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()


def _tree(directory: str) -> List[str]:
    return sorted(os.path.relpath(os.path.join(d, f), directory) for d, _, names in os.walk(directory) for f in names)


def both(directory: str, **more: Any) -> Dict[str, Any]:
    """Trains with the stock Trainer and with ours, and resumes in every way."""
    import torch.distributed as dist

    stock_dir, flash_dir = os.path.join(directory, "stock"), os.path.join(directory, "flash")
    stock = _trainer(False, stock_dir, **more)
    stock.train()
    flash = _trainer(True, flash_dir, **more)
    out: Dict[str, Any] = {"caught": _caught()}
    flash.train()
    flash.wait_latest_checkpoint(60)
    out.update(trained=_weights(flash) == _weights(stock), last=flash.get_last_checkpoint())
    out["caught"] = sorted(set(out["caught"]))
    out["left"] = sorted(n for n in os.listdir(flash_dir) if n.startswith("checkpoint-"))
    dist.barrier()
    if dist.get_rank() == 0:
        out["differences"] = _compare(os.path.join(stock_dir, "checkpoint-4"), os.path.join(flash_dir, "checkpoint-4"))
        shutil.copytree(os.path.join(flash_dir, "checkpoint-4"), os.path.join(directory, "checkpoint-4"))
    dist.barrier()
    resumed = _trainer(False, os.path.join(directory, "a"), **more)
    resumed.train(resume_from_checkpoint=os.path.join(directory, "checkpoint-4"))
    out["stock resumes"] = _weights(resumed) == _weights(stock)
    out["logs"] = [e["loss"] for e in resumed.state.log_history if "loss" in e] == \
        [e["loss"] for e in stock.state.log_history if "loss" in e]
    return out


def _caught() -> List[str]:
    """The names of the files that were not written as files, as they come."""
    from dlrover.trainer.torch.flash_checkpoint import hf_trainer

    names: List[str] = []
    images = hf_trainer._Caught.images

    def noted(self: Any) -> Any:
        names.extend(os.path.basename(path) for path in list(self._weights) + list(self._objects.files))
        return images(self)

    hf_trainer._Caught.images = noted
    return names


def _compare(stock: str, flash: str) -> List[str]:
    wrong = sorted(set(_tree(stock)) ^ set(_tree(flash)))
    for name in set(_tree(stock)) & set(_tree(flash)):
        with open(os.path.join(stock, name), "rb") as a, open(os.path.join(flash, name), "rb") as b:
            x, y = a.read(), b.read()
        if name.endswith((".safetensors", ".json")) and name != "trainer_state.json" and x != y:
            wrong.append(name)
        if name == "trainer_state.json" and json.loads(x)["log_history"][0]["loss"] != \
                json.loads(y)["log_history"][0]["loss"]:
            wrong.append(name)
    return wrong


def interrupted(directory: str, **more: Any) -> Dict[str, Any]:
    """A run that stops after its fourth step, and one that resumes from memory, or disk."""
    undisturbed = _trainer(True, os.path.join(directory, "whole"), **more)
    undisturbed.train()
    home = os.path.join(directory, "home")
    first = _trainer(True, home, **more)

    class Stop(Exception):
        pass

    def failing(*args: Any, **kwargs: Any) -> Any:
        if first.state.global_step == 5:
            raise Stop()
        return type(first).training_step(first, *args, **kwargs)

    first.training_step = failing
    try:
        first.train()
    except Stop:
        pass
    first.wait_latest_checkpoint(60)
    sources = []
    for mode in ("memory-first", "disk"):
        again = _trainer(True, home, **dict(more, save_strategy="no"))
        checkpointer = again._checkpointer(os.path.abspath(home))
        load = checkpointer.engine.load
        checkpointer.engine.load = lambda want="memory-first": load("disk" if mode == "disk" else want)
        seen = again._find(True)
        sources.append([seen.loaded.source, seen.loaded.step])
        again.train(resume_from_checkpoint=True)
        sources.append(_weights(again) == _weights(undisturbed))
    return {"sources": sources}


def best(directory: str) -> Dict[str, Any]:
    from transformers import TrainingArguments

    strategy = "eval_strategy" if hasattr(TrainingArguments, "eval_strategy") else "evaluation_strategy"
    trainer = _trainer(True, directory, eval_steps=2, load_best_model_at_end=True, metric_for_best_model="loss",
                       save_total_limit=2, learning_rate=0.0, max_steps=8, **{strategy: "steps"})
    trainer.train()
    trainer.wait_latest_checkpoint(60)
    left = sorted(n for n in os.listdir(directory) if n.startswith("checkpoint-"))
    return {"last": os.path.basename(trainer.get_last_checkpoint()), "left": left,
            "best": os.path.basename(trainer.state.best_model_checkpoint)}


def _world() -> int:
    """How many ranks are used: 1 where the stock Trainer cannot resume on CPUs, because torch does not know cpu:0."""
    import io

    import torch

    file = io.BytesIO()
    torch.save(torch.ones(1), file)
    file.seek(0)
    try:
        torch.load(file, map_location="cpu:0")
    except (RuntimeError, AssertionError):
        return 1
    return 2


class Hf(unittest.TestCase):
    def setUp(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="hf-")
        self.addCleanup(shutil.rmtree, self.directory)

    def run_ranks(self, function: str, world: int, **arguments: Any) -> List[Any]:
        return ranks.run("tests.test_torch2_hf", function, world, self.directory, **arguments)

    def test_directories_are_those_of_the_stock_trainer(self) -> None:
        world = _world()
        for rank, result in enumerate(self.run_ranks("both", world)):
            self.assertEqual(result.pop("differences", []), [])
            rng = "rng_state_%d.pth" % rank if world > 1 else "rng_state.pth"
            of_rank0 = ["model.safetensors", "optimizer.pt"]
            end = ["scheduler.pt", "training_args.bin"]
            self.assertEqual(result.pop("caught"), (of_rank0 if rank == 0 else []) + [rng] + (end if rank == 0 else []))
            self.assertEqual(result, {"trained": True, "left": ["checkpoint-2", "checkpoint-4", "checkpoint-6"],
                                      "last": os.path.join(self.directory, "flash", "checkpoint-6"),
                                      "stock resumes": True, "logs": True})

    def test_resumes_from_memory_and_from_disk(self) -> None:
        for result in self.run_ranks("interrupted", _world()):
            self.assertEqual(result["sources"], [["memory", 4], True, ["disk", 4], True])

    def test_one_process_in_bfloat16_with_rotation(self) -> None:
        result = self.run_ranks("both", 1, dtype="bfloat16", save_total_limit=2)[0]
        self.assertEqual(result["left"], ["checkpoint-4", "checkpoint-6"])
        self.assertEqual((result["trained"], result["stock resumes"], result["differences"]), (True, True, []))

    def test_the_best_checkpoint_is_kept(self) -> None:
        result = self.run_ranks("best", 1)[0]
        self.assertEqual(result, {"last": "checkpoint-8", "best": "checkpoint-2",
                                  "left": ["checkpoint-2", "checkpoint-8"]})

    def test_an_adapter_of_peft(self) -> None:
        reason = ranks.missing("peft")
        if reason:
            self.skipTest(reason)
        result = self.run_ranks("both", 1, lora=True)[0]
        self.assertEqual((result["trained"], result["stock resumes"], result["differences"]), (True, True, []))

    def test_deepspeed(self) -> None:
        reason = ranks.missing("deepspeed")
        if reason:
            self.skipTest(reason)
        config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
                  "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
        for rank, result in enumerate(self.run_ranks("both", 2, deepspeed=config, bf16=True)):
            self.assertIn("bf16_zero_pp_rank_%d_mp_rank_00_optim_states.pt" % rank, result["caught"])
            self.assertEqual((result["trained"], result["stock resumes"], result.get("differences", [])),
                             (True, True, []))
        for result in self.run_ranks("interrupted", 2, deepspeed=config):
            self.assertEqual(result["sources"], [["memory", 4], True, ["disk", 4], True])

    def test_importing_the_module_does_not_import_transformers(self) -> None:
        import subprocess
        import sys

        code = "import sys, dlrover.trainer.torch.flash_checkpoint.hf_trainer; assert 'transformers' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ranks.PYTHON, timeout=60)


if __name__ == "__main__":
    unittest.main()
