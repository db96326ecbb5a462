"""What a save costs the other ranks: the calls of torch.distributed that it makes."""

import unittest

from core_help import Case

try:
    from torch.distributed.tensor import distribute_tensor
except ImportError:  # before torch 2.5
    distribute_tensor = None

# calls has the name of each call that communicates. What such a call calls itself is not counted.
COUNT = """
    import inspect, threading
    import torch.distributed.distributed_c10d as c10d
    calls, inside = [], threading.local()
    def counted(name, real):
        def f(*args, **kwargs):
            if getattr(inside, "yes", False):
                return real(*args, **kwargs)
            calls.append(name)
            inside.yes = True
            try:
                return real(*args, **kwargs)
            finally:
                inside.yes = False
        return f
    def communicates(name, f):
        if name.startswith(("_", "get_", "is_", "destroy_")) or not inspect.isfunction(f):
            return False
        return name.startswith(("new_", "batch_")) or "group" in inspect.signature(f).parameters
    for name, f in list(vars(c10d).items()):
        if communicates(name, f):
            for module in (c10d, dist):
                setattr(module, name, counted(name, f))
    for name in "all_gather all_gather_object all_reduce barrier broadcast gather_object new_group recv send".split():
        assert getattr(dist, name).__name__ == "f", name
    def during(work):
        calls.clear()
        work()
        done = list(calls)
        dist.barrier()
        return done
"""
DDP = COUNT + """
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
    c = DdpCheckpointer(dir)
    c._engine._has_daemon = lambda: True
    state = {"w": torch.ones(10)}
    for step, kind in enumerate([StorageType.MEMORY, StorageType.DISK, StorageType.MEMORY], 1):
        print(during(lambda: c.save_checkpoint(step, state, storage_type=kind)))
"""
SHARDED = COUNT + """
    from dlrover_ckpt.engine import Engine, StorageType
    from dlrover_ckpt.image import torch_zip
    e = Engine(dir, "fsdp", shard=rank, shards=dist.get_world_size(), primary=True)
    e._has_daemon = lambda: True
    def save(step, kind):
        return during(lambda: e.save(step, [torch_zip("%d/%d.pt" % (step, rank), {"w": torch.ones(10)})], kind))
"""
FSDP = COUNT + """
    from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpShardCheckpointer, StorageType
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    c = FsdpShardCheckpointer(dir)
    c._engine._has_daemon = lambda: True
    state = {"w": distribute_tensor(torch.ones(10), init_device_mesh("cpu", (2,)), [Shard(0)]), "step": 0}
    def save(step, kind):
        state["step"] = step
        return during(lambda: c.save_checkpoint(step, state, dir + "/%d" % step, storage_type=kind))
    assert save(1, StorageType.MEMORY)  # the ranks agree once on who writes what
"""


class Collectives(Case):
    def setUp(self):
        super().setUp()
        self.launched()

    def test_counter(self):
        """It sees what torch.distributed does in whatever way it is called."""
        out = self.world(COUNT + """
    from torch.distributed import distributed_c10d
    def work():
        dist.barrier()
        distributed_c10d.all_reduce(torch.ones(1))
        dist.all_gather_object([None, None], rank)
    print(during(work), during(lambda: None))
    """)
        self.assertEqual(out, ["['barrier', 'all_reduce', 'all_gather_object'] []\n"] * 2)

    def test_full_state(self):
        """Nobody is asked: rank 0 alone writes it."""
        self.assertEqual(self.world(DDP), ["[]\n" * 3] * 2)

    def test_shards(self):
        """A save in memory is each rank's own; to leave one on disk to the daemons is agreed on, once."""
        out = self.world(SHARDED + """
    for step, kind in enumerate([StorageType.MEMORY, StorageType.MEMORY, StorageType.DISK, StorageType.DISK], 1):
        print(save(step, kind))
    """)
        self.assertEqual(out, ["[]\n[]\n['all_gather_object']\n['all_gather_object']\n"] * 2)

    def test_load(self):
        """The ranks agree in one exchange. Where no daemon has completed interrupted commits, that is done in between; and
        a rank that has another newest save than the others is asked again, and all are if one may have more."""
        out = self.world(SHARDED + """
    import glob
    from dlrover_ckpt.restore import Search
    save(1, StorageType.MEMORY)
    print(during(lambda: e.load()))
    mine = lambda: ["seg/" + os.path.basename(f) for f in glob.glob(top + "/run/seg/l%d-*.seg" % rank)]
    Search._offered = lambda self, _: (mine(), False)
    print(during(lambda: e.load()))
    if rank:
        e.save(2, [torch_zip("2/1.pt", {"w": torch.ones(10)})], StorageType.MEMORY)
    dist.barrier()
    print(during(lambda: print(e.load().step)))
    for more in (False, rank == 1):
        Search._offered = lambda self, _: ([], more)
        print(during(lambda: e.load()))
    """)
        exchanges = tuple(["all_gather_object"] * n for n in (3, 1, 2, 1, 2))
        self.assertEqual(out, ["%s\n%s\n1\n%s\n%s\n%s\n" % exchanges] * 2)

    def test_no_room(self):
        """A rank that has no room in memory tells nobody when nobody waits for it."""
        out = self.world(SHARDED + """
    if rank == 1:
        e._pool.acquire = lambda *_: None
    print(save(1, StorageType.MEMORY))
    """)
        self.assertEqual(out, ["[]\n"] * 2)

    @unittest.skipIf(distribute_tensor is None, "SAVES OF FSDP ARE NOT COUNTED: there is no torch.distributed.tensor")
    def test_fsdp(self):
        out = self.world(FSDP + """
    for step, kind in enumerate([StorageType.MEMORY, StorageType.MEMORY, StorageType.DISK, StorageType.DISK], 2):
        print(save(step, kind))
    """)
        self.assertEqual(out, ["[]\n[]\n['all_gather_object']\n['all_gather_object']\n"] * 2)


if __name__ == "__main__":
    unittest.main()
