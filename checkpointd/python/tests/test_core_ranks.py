"""Several ranks: gloo groups on the loopback interface."""

import os
import unittest

from core_help import Case

import torch  # noqa: F401  (fails early where there is none)

from dlrover_ckpt import sync

DDP = """
    import logging; logging.basicConfig(stream=sys.stderr)
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
    c = DdpCheckpointer(dir)
    def save(step, kind=StorageType.MEMORY):
        c.save_checkpoint(step, {"w": torch.full((10,), float(step)), "step": step}, storage_type=kind)
        dist.barrier()
"""
SHARDED = """
    from dlrover_ckpt.engine import Engine, StorageType
    from dlrover_ckpt.image import torch_zip, torch_load
    e = Engine(dir, "fsdp", shard=rank, shards=dist.get_world_size(), primary=True)
    def save(step, kind=StorageType.MEMORY):
        state = {"w": torch.full((10,), float(step * 10 + rank)), "step": step}
        ok = e.save(step, [torch_zip("%d/%d.pt" % (step, rank), state)], kind)
        dist.barrier()
        return ok
    def load(want="memory-first"):
        got = e.load(want)
        if got is None:
            return "nothing"
        path = "%d/%d.pt" % (got.step, rank)
        state = torch_load(got.files[path]) if got.files else torch.load(os.path.join(dir, path))
        assert float(state["w"][0]) == got.step * 10 + rank
        return "%s %d" % (got.source, got.step)
"""


class Ddp(Case):
    def setUp(self):
        super().setUp()
        self.launched()

    def test_all_ranks_load_the_same(self):
        self.world(DDP + """
    save(1, StorageType.DISK)
    c.wait_latest_checkpoint(30)
    save(2)
    """)
        self.assertEqual(os.listdir(os.path.join(self.dir, "1")), ["rank_0.pt"])
        out = self.world(DDP + """
    got = c.load_checkpoint()
    print(got["step"], float(got["w"][0]))
    save(3)
    """, DLROVER_CKPT_EPOCH="f")
        self.assertEqual([o.split() for o in out], [["2", "2.0"]] * 2)
        out = self.world(DDP + "    print(c.load_checkpoint()['step'])\n", ranks=1)  # a smaller world
        self.assertEqual(out[0].split(), ["3"])

    def test_from_disk(self):
        self.world(DDP + "    save(1, StorageType.DISK)\n")
        seg = os.path.join(os.environ["DLROVER_CKPT_RUNTIME"], "seg")
        for name in os.listdir(seg):
            os.remove(os.path.join(seg, name))
        out = self.world(DDP + """
    print(c.load_checkpoint()["step"], c.load_checkpoint(dir + "/1/rank_0.pt")["step"])
    """)
        self.assertEqual([o.split() for o in out], [["1", "1"]] * 2)


class Sharded(Case):
    def setUp(self):
        super().setUp()
        self.launched()

    def test_save_and_load(self):
        out = self.world(SHARDED + """
    assert load() == "nothing"
    save(1, StorageType.DISK); save(2)
    print(load(), load("disk"))
    """)
        self.assertEqual(out, ["memory 2 disk 1\n"] * 2)
        m = sync.manifest(self.dir, 1)
        self.assertEqual([f["shard"] for f in m["files"]], [0, 1])
        self.assertEqual(sync.verify(self.dir, m), "")
        out = self.world(SHARDED + "    print(load())\n", DLROVER_CKPT_EPOCH="f")
        self.assertEqual(out, ["memory 2\n"] * 2)

    def test_only_what_all_ranks_have(self):
        out = self.world(SHARDED + """
    save(1); save(2)
    if rank == 1:
        for b in e._pool.buffers:
            if b.fd >= 0 and b.header().step == 2:
                b.begin()
    print(load())
    """)
        self.assertEqual(out, ["memory 1\n"] * 2)

    def test_a_world_of_another_size(self):
        self.world(SHARDED + "    save(1, StorageType.DISK); save(2)\n")
        out = self.world(SHARDED + "    got = e.load(); print(got.source, got.step, got.world_size)\n", ranks=1)
        self.assertEqual(out, ["disk 1 2\n"])

    def test_damage_of_one_rank_counts_for_all(self):
        self.world(SHARDED + "    save(1, StorageType.DISK); save(2, StorageType.DISK)\n")
        os.truncate(os.path.join(self.dir, "2", "1.pt"), 10)
        out = self.world(SHARDED + "    print(load('disk'))\n")
        self.assertEqual(out, ["disk 1\n"] * 2)

    def test_one_rank_without_room(self):
        """With a daemon for the others all write it themselves."""
        out = self.world(SHARDED + """
    e._has_daemon = lambda: True
    if rank == 1:
        e._pool.acquire = lambda *_: None
    print(save(1, StorageType.DISK), load("disk"))
    """)
        self.assertEqual(out, ["True disk 1\n"] * 2)

    def test_one_rank_that_cannot_write(self):
        out = self.world(SHARDED + """
    from dlrover_ckpt import sync
    if rank == 1:
        def full(*_):
            raise OSError("no space")
        sync.write_image = full
    for _ in range(2):
        try:
            save(1, StorageType.DISK)
        except sync.SaveFailed as x:
            print("failed" if "no space" in str(x) else x)
    print(os.listdir(dir + "/.dlrover/stage"))
    """)
        self.assertEqual([o.splitlines()[:2] for o in out], [["failed"] * 2] * 2)

    def test_one_rank_whose_state_cannot_be_taken(self):
        out = self.world(SHARDED + """
    def images():
        if rank == 1:
            raise KeyError("weight")
        return [torch_zip("1/%d.pt" % rank, {})]
    try:
        e.save(1, images, StorageType.DISK)
    except Exception as x:
        print(type(x).__name__)
    """)
        self.assertEqual([o.strip() for o in out], ["SaveFailed", "KeyError"])


if __name__ == "__main__":
    unittest.main()
