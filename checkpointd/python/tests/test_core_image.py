"""Images of torch.save files: the same objects come back from torch.load and from torch_load."""

import argparse
import collections
import io
import os
import unittest
import zipfile

from core_help import ROOT, Case, render

import torch

from dlrover_ckpt import image
from dlrover_ckpt.image import raw, torch_load, torch_zip

Pair = collections.namedtuple("Pair", "first second")
NEW = int(torch.__version__.split(".")[0]) >= 2


def reload(data, **options):
    if NEW:
        options.setdefault("weights_only", False)
    return torch.load(io.BytesIO(data), **options)


def storable(dtype):
    """Whether this torch knows a type, and torch.save stores it."""
    try:
        torch.save(torch.ones(3).to(getattr(torch, dtype)), io.BytesIO())
    except (AttributeError, KeyError):
        return False
    return True


class Fidelity(Case):
    def both(self, obj, cache=None):
        data = render(torch_zip("x", obj, cache))
        with zipfile.ZipFile(io.BytesIO(data)) as z:
            self.assertIsNone(z.testzip())
        return torch_load(data), reload(data)

    def test_torch_finds_nothing_deprecated(self):
        """Tensors with attributes, as those of ZeRO 3, are pickled with typed storages, of which torch 2 warns."""
        code = """
            import torch, warnings
            from core_help import render
            from dlrover_ckpt.image import torch_load, torch_zip

            class Own(torch.Tensor):
                pass

            warnings.simplefilter("error")  # torch warns once in a process
            tensor, parameter = torch.arange(4.0), torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            tensor.ds_id = parameter.ds_id = 1
            own = torch.ones(2).as_subclass(Own)
            own.mark = 1
            state, cache = {"tensor": tensor, "parameter": parameter, "own": own, "plain": torch.ones(2)}, {}
            for _ in range(2):
                image = torch_zip("x", state, cache)
                again = torch_load(render(image))
                print(type(image).__name__, again["tensor"].tolist(), again["parameter"].tolist(), again["own"].mark)
        """
        out = self.finish(self.child(code, PYTHONPATH=os.path.join(ROOT, "tests")))
        self.assertEqual(out.splitlines(), ["_ZipImage [0.0, 1.0, 2.0, 3.0] [1.0, 1.0, 1.0] 1"] * 2)

    def test_kinds_of_objects_come_back(self):
        base = torch.arange(12.0)
        cases = {
            "plain": base, "view": base[2:5], "transposed": base.view(3, 4).t(), "empty": torch.zeros(0, 7),
            "zero-dim": torch.tensor(3), "bool": torch.tensor([True, False]), "int8": torch.ones(3, dtype=torch.int8),
            "bf16": torch.ones(3, dtype=torch.bfloat16), "complex": torch.ones(2, dtype=torch.complex64),
            "conjugate": torch.tensor([1 + 2j]).conj(), "negative": torch.tensor([1 + 2j]).conj().imag,
            "grad": torch.ones(2, requires_grad=True), "parameter": torch.nn.Parameter(torch.ones(2)),
            "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False), "sparse": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(), "expanded": torch.ones(1, 3).expand(4, 3),
            "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "meta": torch.ones(3, device="meta"), "module": torch.nn.Linear(2, 2),
            "namespace": argparse.Namespace(lr=0.1, w=base), "named tuple": Pair(base, [base, (base, {"a": base})]),
            "others": [1, -1, 2**40, 2.5, None, "text", b"bytes", {"k"}, True],
        }
        cases.update({name: torch.ones(3).to(getattr(torch, name))
                      for name in ("float8_e4m3fn", "uint16") if storable(name)})
        for name, value in cases.items():
            cache = {}
            for attempt in range(2):  # the second time from the cache
                with self.subTest(name, attempt=attempt):
                    expected = io.BytesIO()
                    torch.save({"v": value}, expected)
                    expected = reload(expected.getvalue())["v"]
                    for got in self.both({"v": value}, cache):
                        self.assertEqual(str(got["v"]), str(expected))
                        self.assertIs(type(got["v"]), type(expected))
                        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                            self.assertEqual(got["v"].stride(), expected.stride())
                            self.assertEqual(got["v"].requires_grad, expected.requires_grad)

    def test_shared_storages_stay_shared(self):
        w = torch.arange(10.0)
        for got in self.both({"w": w, "view": w[3:], "again": w}):
            got["w"][4] = 99
            self.assertEqual(got["view"][1], 99)
            self.assertIs(got["w"], got["again"])

    def test_a_parameter_that_occurs_twice_is_one_object(self):
        p = torch.nn.Parameter(torch.ones(2))
        for got in self.both([p, [p], {"p": p}, "text", "text"]):
            self.assertIs(got[0], got[1][0])
            self.assertIs(got[0], got[2]["p"])
            self.assertEqual(got[3:], ["text", "text"])

    def test_a_state_dict_loads_with_weights_only(self):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        opt = torch.optim.AdamW(model.parameters())
        model(torch.ones(5, 3)).sum().backward()
        opt.step()
        state = {"model": model.state_dict(), "opt": opt.state_dict(), "step": 7, "tied": model[0].weight}
        if not NEW:
            del state["opt"]  # this torch refuses every float then
        got = reload(render(torch_zip("x", state)), weights_only=True)
        self.assertTrue(torch.equal(got["model"]["0.weight"], model[0].weight))
        self.assertEqual(got["step"], 7)

    @unittest.skipUnless(NEW, "torch 1.13 cannot map files")
    def test_a_file_can_be_mapped(self):
        path = self.top + "/x.pt"
        with open(path, "wb") as f:
            f.write(render(torch_zip("x", {"w": torch.arange(1 << 19)})))
        self.assertEqual(torch.load(path, mmap=True, weights_only=True)["w"][77], 77)

    def test_loaded_tensors_are_views(self):
        data = render(torch_zip("x", {"w": torch.zeros(4)}))
        got = torch_load(data)
        before = bytes(data)
        got["w"][0] = 1
        self.assertNotEqual(before, bytes(data))

    def test_what_torch_refuses_is_refused(self):
        with self.assertRaises(Exception):
            torch_zip("x", {"f": lambda: 1})

    def test_old_format_and_own_format_of_torch_are_read(self):
        for zipped in (True, False):
            buf = io.BytesIO()
            torch.save({"w": torch.ones(3)}, buf, _use_new_zipfile_serialization=zipped)
            self.assertEqual(torch_load(bytearray(buf.getvalue()))["w"][2], 1)


class Layout(Case):
    def test_alignment_and_order(self):
        data = render(torch_zip("x", {"big": torch.zeros(1 << 19), "small": torch.zeros(3), "odd": torch.ones(1)}))
        with zipfile.ZipFile(io.BytesIO(data)) as z:
            infos = z.infolist()
        self.assertEqual(infos[-1].filename, "archive/data.pkl")
        names = {i.filename for i in infos}
        self.assertTrue({"archive/version", "archive/byteorder"} <= names)
        self.assertNotIn("archive/.format_version", names)
        for i in infos:
            at = i.header_offset + 30 + int.from_bytes(data[i.header_offset + 26:i.header_offset + 28], "little") \
                + int.from_bytes(data[i.header_offset + 28:i.header_offset + 30], "little")
            self.assertEqual(at % (4096 if i.file_size >= 1 << 20 else 64), 0, i)
            self.assertFalse(i.flag_bits)
        self.assertNotIn(b"\xee", bytes(data[:200]))

    def test_every_byte_is_covered(self):
        img = torch_zip("x", {"w": torch.zeros(1000, dtype=torch.uint8)})
        self.assertEqual(sum(len(d) for _, d in img.pieces) + sum(n for _, n, _ in img.tensors), img.length)

    def test_64_bit_fields(self):
        book = image._Book()
        for n in (5, 1 << 20):
            book.key(image._untyped(torch.full((n,), 3, dtype=torch.uint8)), torch.uint8, 0)
        z = image._Zip(book, 40, force64=True)
        img = image._ZipImage("x", z, b"\x80\x02}." + bytes(36), "", image._Keep([], book.kept))
        data = render(img)
        with zipfile.ZipFile(io.BytesIO(data)) as f:
            self.assertIsNone(f.testzip())
            self.assertEqual(f.read("archive/data/1")[:3], b"\3\3\3")
            self.assertTrue(all(i.extract_version == 45 for i in f.infolist()))
        self.assertEqual(reload(data), {})
        self.assertEqual(torch_load(data), {})

    def test_many_small_tensors(self):
        state = {"l.%d" % i: torch.full((8,), i) for i in range(32768)}
        cache = {}
        torch_zip("x", state, cache)
        state["l.5"].fill_(-1)
        img = torch_zip("x", dict(state), cache)
        data = render(img)
        got = torch_load(data)
        self.assertEqual(len(got), 32768)
        self.assertEqual((int(got["l.5"][0]), int(got["l.32767"][7])), (-1, 32767))


class Cache(Case):
    def check(self, cache, obj):
        got = torch_load(render(torch_zip("x", obj, cache)))
        self.assertEqual(str(got), str(obj))
        return cache["zip"].zip

    def test_contents_and_values_reuse_the_layout(self):
        w = torch.zeros(4)
        cache = {}
        first = self.check(cache, {"w": w, "step": 1, "note": "a"})
        w.fill_(2)
        self.assertIs(self.check(cache, {"w": w.detach(), "step": 1, "note": "a"}), first)
        self.assertIs(self.check(cache, {"w": w, "step": 10**12, "note": "a longer text", "lr": [0.1]}), first)

    def test_layout_names_structure_not_values(self):
        w, cache = torch.zeros(4), {}
        a = torch_zip("x", {"w": w, "step": 1}, cache).layout
        self.assertEqual(torch_zip("x", {"w": w + 1, "step": 2}).layout, a)
        self.assertEqual(torch_zip("x", {"w": w, "step": 2}, cache).layout, a)
        self.assertNotEqual(torch_zip("x", {"v": w, "step": 2}, cache).layout, a)
        self.assertNotEqual(torch_zip("x", {"w": torch.zeros(5), "step": 2}).layout, a)

    def test_values_are_compared_with_their_types(self):
        cache = {}
        for v in (1, True, 1.0, "1", -0.0, 0.0, None, [1], (1,)):
            got = torch_load(render(torch_zip("x", {"w": torch.ones(1), "v": v}, cache)))
            self.assertEqual(repr(got["v"]), repr(v))

    def test_every_change_of_a_tensor_is_seen(self):
        base = torch.arange(16.0)
        changes = [base, base.view(4, 4), base.view(4, 4).t(), base.view(torch.int32), base[1:], base[:8],
                   base.clone(), torch.nn.Parameter(base), base.detach().requires_grad_(), base.to(torch.float64),
                   torch.zeros(0, 3), torch.zeros(0, 4), base.to_sparse(), torch.tensor(2.0)]
        for first in changes:
            cache = {}
            self.both(first, cache)
            for second in changes:
                self.both(second, cache)

    def both(self, value, cache):
        got = torch_load(render(torch_zip("x", {"v": value}, cache)))["v"]
        self.assertEqual(str(got), str(value))
        self.assertIs(type(got), type(value))

    def test_resized_storage_and_ties(self):
        cache = {}
        big = torch.zeros(100)
        self.check(cache, {"a": big[:10], "b": big[:10]})
        small = big[:10].clone()
        self.check(cache, {"a": small, "b": small.clone()})
        got = torch_load(render(torch_zip("x", {"a": small, "b": small[:]}, cache)))
        got["a"][0] = 5
        self.assertEqual(got["b"][0], 5)

    def test_a_growing_state(self):
        cache, model = {}, torch.nn.Linear(3, 3)
        opt = torch.optim.Adam(model.parameters())
        for _ in range(3):
            got = torch_load(render(torch_zip("x", {"m": model.state_dict(), "o": opt.state_dict()}, cache)))
            self.assertEqual(str(got["o"]), str(opt.state_dict()))
            model(torch.ones(1, 3)).sum().backward()
            opt.step()

    def test_the_cache_keeps_no_tensor_alive(self):
        import gc
        import weakref

        cache, w = {}, torch.zeros(4)
        torch_zip("x", {"w": w}, cache)
        ref = weakref.ref(w)
        del w
        gc.collect()
        self.assertIsNone(ref())


class Raw(unittest.TestCase):
    def test_raw(self):
        img = raw("a/b", bytearray(b"123"))
        self.assertEqual((img.path, img.kind, img.length, bytes(render(img))), ("a/b", "raw", 3, b"123"))
        self.assertEqual(img.fixups, [])


if __name__ == "__main__":
    unittest.main()
