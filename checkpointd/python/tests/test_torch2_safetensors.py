"""Safetensors images against the safetensors package."""

from __future__ import annotations

import os
import tempfile
import unittest
from typing import Any, Dict

from dlrover_ckpt.safetensors_image import _DTYPES, from_header, parse_header, safetensors_image
from tests import torch2_ranks as ranks


def setUpModule() -> None:
    ranks.need("safetensors")


def _all_dtypes() -> Dict[str, Any]:
    import torch

    tensors = {name: torch.arange(24, dtype=torch.uint8).view(getattr(torch, name))
               for name, _ in _DTYPES if name != "bool" and _storable(name)}
    return dict(tensors, bool=torch.tensor([True, False, True]))


def _storable(name: str) -> bool:
    """Whether torch and the safetensors package both know the type."""
    import torch
    from safetensors.torch import save

    try:
        save({"x": torch.empty(1, dtype=getattr(torch, name))})
    except (AttributeError, KeyError):
        return False
    return True


def _views() -> Dict[str, Any]:
    import torch

    block = torch.arange(10.0)
    return {"é\n\"q": torch.ones(3), "empty": torch.empty(0, 7), "scalar": torch.tensor(3.0), "b": block[5:],
            "a": block[:5], "parameter": torch.nn.Parameter(torch.ones(2, 3))}


class Safetensors(unittest.TestCase):
    def test_bytes_are_those_of_save_file(self) -> None:
        from safetensors.torch import save

        cases = {"dtypes": (_all_dtypes(), None), "views": (_views(), {"format": "pt"}), "nothing": ({}, None)}
        for name, (tensors, metadata) in cases.items():
            with self.subTest(name):
                image = safetensors_image("x", tensors, metadata)
                self.assertEqual(bytes(ranks.bytes_of(image)), save(tensors, metadata))

    def test_safe_open_reads_it(self) -> None:
        import torch
        from safetensors import safe_open

        tensors = {"w": torch.randn(5, 7).to(torch.bfloat16), "b": torch.randn(3)}
        with tempfile.TemporaryDirectory() as directory:
            ranks.write([safetensors_image("m.safetensors", tensors)], directory)
            with safe_open(os.path.join(directory, "m.safetensors"), "pt") as f:
                for name in f.keys():
                    self.assertTrue(ranks.same(f.get_tensor(name), tensors[name]))

    def test_what_safetensors_refuses_is_refused_alike(self) -> None:
        import torch
        from safetensors.torch import save

        whole = torch.ones(4, 4)
        cases = {"tied": {"a": whole, "b": whole}, "overlap": {"a": whole, "b": whole[1:]},
                 "strided": {"a": whole.t()[:2]}, "sparse": {"a": whole.to_sparse()}, "number": {"a": 3}}
        for name, tensors in cases.items():
            with self.subTest(name):
                with self.assertRaises((RuntimeError, ValueError)) as theirs:
                    save(tensors)
                with self.assertRaises(type(theirs.exception)):
                    safetensors_image("x", tensors)

    def test_dedupe_is_that_of_save_model(self) -> None:
        import torch
        from safetensors.torch import save_model

        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[1].weight = model[0].weight
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "m")
            save_model(model, path)
            with open(path, "rb") as f:
                theirs = f.read()
        image = safetensors_image("x", model.state_dict(), dedupe=True)
        self.assertEqual(bytes(ranks.bytes_of(image)), theirs)

    def test_the_parts_of_a_disjoint_storage_cannot_be_deduped(self) -> None:
        import torch

        block = torch.ones(9)
        with self.assertRaises(RuntimeError):
            safetensors_image("x", {"a": block[:5], "b": block[4:]}, dedupe=True)

    def test_a_parsed_header_makes_the_same_file(self) -> None:
        tensors = _views()
        body = bytes(ranks.bytes_of(safetensors_image("x", tensors)))
        header, entries = parse_header(body)
        self.assertEqual(bytes(ranks.bytes_of(from_header("x", header, [tensors[n] for n in entries]))), body)
        for bad in (b"", b"\x10" + bytes(7), b"\xff" * 16):
            with self.assertRaises(ValueError):
                parse_header(bad)


if __name__ == "__main__":
    unittest.main()
