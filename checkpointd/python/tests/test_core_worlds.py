"""Checkpoints that do not fit the whole job: of another number of shards, or that not all nodes see."""

import os
import shutil
import unittest

from core_help import Case

import torch

from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
from dlrover_ckpt import find
from dlrover_ckpt.find import Commit, Disk
from dlrover_ckpt.restore import Unloadable

_SAVE = """
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
size = dist.get_world_size()
c = DdpCheckpointer(dir, local_shard_num=size, global_shard_num=size)
c.save_checkpoint(7, {"part": rank})
c.wait_latest_checkpoint(60)
"""

_LOAD = """
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
size = int(os.environ.get("SHARDS") or dist.get_world_size())
c = DdpCheckpointer(%s, local_shard_num=size, global_shard_num=size)
try:
    print("got", c.load_checkpoint())
except RuntimeError as e:
    print("refused", e)
"""


class Shards(Case):
    def test_another_number_of_shards(self):
        """A part for each rank of a smaller world would leave the others out, and a larger one has none for some."""
        self.world(_SAVE, ranks=3)
        before = sorted(os.listdir(self.dir + "/7"))
        for memory in (True, False):
            if not memory:
                shutil.rmtree(self.shm)
                os.mkdir(self.shm)
            for ranks in (2, 4):
                for out in self.world(_LOAD % "dir", ranks=ranks, DLROVER_CKPT_EPOCH="f"):
                    self.assertIn("refused step 7 in %s is of 3 shards, saved by 3 ranks, and this job has %d: load it"
                                  % (self.dir, ranks), out)
        with self.assertRaisesRegex(Unloadable, "3 shards.*this job has 1"):
            DdpCheckpointer(self.dir).load_checkpoint()
        self.assertEqual(sorted(os.listdir(self.dir + "/7")), before)
        outs = self.world(_LOAD % "dir", ranks=3, DLROVER_CKPT_EPOCH="g")
        self.assertEqual(sorted(outs), ["got {'part': %d}\n" % r for r in range(3)])

    def test_the_full_state_fits_any_world(self):
        DdpCheckpointer(self.dir).save_checkpoint(7, {"whole": 1})
        os.environ["SHARDS"] = "1"
        self.addCleanup(os.environ.pop, "SHARDS")
        self.assertEqual(self.world(_LOAD % "dir"), ["got {'whole': 1}\n"] * 2)

    def test_of_another_program(self):
        for files, shards, fits in ((1, 1, True), (4, 1, False), (2, 2, True), (4, 2, False), (1, 2, False), (0, 2, False)):
            with self.subTest(files=files, shards=shards):
                shutil.rmtree(self.dir, True)
                os.makedirs(self.dir + "/5")
                for i in range(files):
                    torch.save({"part": i}, self.dir + "/5/rank_%d.pt" % i)
                with open(self.dir + "/dlrover_latest.txt", "w") as f:
                    f.write("5")
                c = DdpCheckpointer(self.dir, global_shard_num=shards)
                if fits:
                    self.assertEqual(c.load_checkpoint(), {"part": 0})
                else:
                    with self.assertRaisesRegex(RuntimeError, "step 5 in .* has %d files .* this job has %d shards"
                                                % (files, shards)):
                        c.load_checkpoint()


class Nodes(Case):
    def test_a_directory_that_one_node_has(self):
        """A new run would overwrite the steps that are there."""
        for i in range(2):
            os.mkdir(self.top + "/node%d" % i)
        DdpCheckpointer(self.top + "/node0").save_checkpoint(7, {"a": 1})
        for b in os.listdir(self.shm):
            shutil.rmtree(os.path.join(self.shm, b))
        os.environ["SHARDS"] = "1"
        self.addCleanup(os.environ.pop, "SHARDS")
        code = "os.environ['GROUP_RANK'] = str(rank)\n" + _LOAD % "top + '/node%d' % rank"
        for rank, out in enumerate(self.world(code)):
            self.assertIn("refused not all nodes see the same checkpoints in %s/node%d: node 0 sees step 7, node 1 sees no "
                          "step; it has to be on storage that all nodes see" % (self.top, rank), out)
        shutil.rmtree(self.top + "/node1")
        shutil.copytree(self.top + "/node0", self.top + "/node1")
        self.assertEqual(self.world(code), ["got {'a': 1}\n"] * 2)

    def test_nothing_anywhere(self):
        code = "os.environ['GROUP_RANK'] = str(rank)\n" + _LOAD % "top + '/node%d' % rank"
        self.assertEqual(self.world(code), ["got {}\n"] * 2)

    def test_what_is_said(self):
        def disk(*steps):
            return Disk([Commit(s, "save%d" % s, s, s) for s in steps], None, 0)

        cases = {
            "all see the same": ([disk(1), disk(1)], [0, 1], ""),
            "nobody sees any": ([disk(), disk()], [0, 1], ""),
            "one rank of a node is enough": ([disk(1), disk(), disk(1)], [0, 0, 1], ""),
            "one sees none": ([disk(3, 5), disk()], [0, 1], "node 0 sees steps 5, 3, node 1 sees no step"),
            "many": ([disk(1, 2, 3, 4, 5)] + [disk()] * 9, list(range(10)),
                     "node 0 sees steps 5, 4, 3 and 2 more, " + ", ".join("node %d sees no step" % n for n in range(1, 8))
                     + " and so on for 10 nodes"),
        }
        for name, (disks, nodes, expected) in cases.items():
            with self.subTest(name):
                self.assertEqual(find.unseen(disks, nodes), expected)


if __name__ == "__main__":
    unittest.main()
