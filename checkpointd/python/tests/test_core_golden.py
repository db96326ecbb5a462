"""What recovery makes of the directories that a crash leaves; the Go half is held against the same ones.

checkpointd/testdata/stage/README.md has the format.
"""

import json
import os
import shutil
import time
import unittest

from core_help import ROOT, Case

from dlrover_ckpt import sync

GOLDEN = os.path.join(os.path.dirname(ROOT), "testdata", "stage")


def state(directory):
    """What a reader finds: the tracked step, the steps with a manifest, and those whose files are right."""
    found, _ = sync.manifests(directory)
    return {"tracked": sync.tracked(directory), "steps": [m["step"] for m in found],
            "good": [m["step"] for m in found if not sync.verify(directory, m)]}


def files(directory):
    """{path: content} of all files below a directory."""
    out = {}
    for top, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(top, name)
            with open(path, "rb") as f:
                out[os.path.relpath(path, directory)] = f.read()
    return out


def age(path, seconds):
    at = time.time() - seconds
    for top, directories, names in os.walk(path):
        for name in directories + names:
            os.utime(os.path.join(top, name), (at, at))


class Golden(Case):
    def test_recovery(self):
        cases = sorted(e.name for e in os.scandir(GOLDEN) if e.is_dir())
        self.assertTrue(cases)
        for name in cases:
            with open(os.path.join(GOLDEN, name, "expected.json")) as f:
                expected = json.load(f)
            tree = os.path.join(GOLDEN, name, "tree")
            with self.subTest(name, about=expected["about"]):
                self.assertEqual(state(tree), expected["before"])
            for outcome in expected["outcomes"]:
                with self.subTest(name, about=expected["about"], age=outcome["stage_age_s"]):
                    self.recovered(tree, outcome)

    def copy(self, tree):
        shutil.rmtree(self.dir, ignore_errors=True)
        shutil.copytree(tree, self.dir, copy_function=shutil.copyfile)

    def test_saves_are_completed_in_their_order(self):
        """That of their times, not of their names."""
        self.copy(os.path.join(GOLDEN, "intent", "tree"))
        stages = os.path.join(self.dir, ".dlrover", "stage")
        with open(os.path.join(stages, "s2", "intent")) as f:
            text = f.read()
        later = json.loads(text.replace("global_step20", "global_step30"))
        later.update(save="a3", step=30, saved_ns=later["saved_ns"] + 1)
        os.makedirs(os.path.join(stages, "a3"))
        with open(os.path.join(stages, "a3", "intent"), "w") as f:
            json.dump(later, f)
        os.makedirs(os.path.join(self.dir, "global_step30"))
        for shard in "01":
            shutil.copyfile(os.path.join(self.dir, "global_step20", ".%s_model.pt.s2.tmp" % shard),
                            os.path.join(self.dir, "global_step30", ".%s_model.pt.a3.tmp" % shard))
        self.assertEqual(sync.recover(self.dir), [])
        found, _ = sync.manifests(self.dir)
        self.assertEqual([m["step"] for m in found], [30, 20, 10])
        self.assertGreater(found[0]["committed_ns"], found[1]["committed_ns"])

    def recovered(self, tree, expected):
        self.copy(tree)
        age(self.dir, 0)
        age(os.path.join(self.dir, ".dlrover", "stage"), expected["stage_age_s"])
        sync.recover(self.dir)
        left = files(self.dir)
        found = dict(state(self.dir), stage_age_s=expected["stage_age_s"], files=sorted(left, key=os.fsencode))
        self.assertEqual(found, expected)
        sync.recover(self.dir)
        self.assertEqual(files(self.dir), left, "once more")


if __name__ == "__main__":
    unittest.main()
