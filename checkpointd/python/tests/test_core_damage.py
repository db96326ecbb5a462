"""Checkpoint directories that somebody has damaged, or in which somebody has put something else."""

import json
import os
import shutil
import time
import unittest

from core_help import Case
import test_core_engine as core

from dlrover_ckpt import sync
from dlrover_ckpt.image import raw

MEMORY, DISK = core.MEMORY, core.DISK


def _fifo(path):
    os.unlink(path)
    os.mkfifo(path)


def _sparse(path):
    with open(path, "wb") as f:
        f.truncate(1 << 30)


def _link(path):
    shutil.move(path, path + ".real")
    os.symlink(path + ".real", path)


def _garbage(path):
    with open(path, "wb") as f:
        f.write(b"\xff\x00{")


class Readers(core.One):
    def test_what_should_be_a_small_file(self):
        """No tracker and no manifest makes a load wait or crawl, and the log says why it was not used."""
        for name, why in ((sync.LATEST, "dlrover_latest.txt is not used"), (".dlrover/2.json", "step 2: its manifest is damaged")):
            for damage in (_fifo, _sparse, _link, _garbage):
                with self.subTest(name=name, damage=damage.__name__):
                    shutil.rmtree(self.dir, True)
                    e = self.engine()
                    self.save(e, 1, DISK)
                    self.save(e, 2, DISK)
                    damage(os.path.join(self.dir, name))
                    began = time.monotonic()
                    with self.assertLogs("dlrover.ckpt", "WARNING") as logs:
                        found = self.loaded(e, "disk")
                    self.assertLess(time.monotonic() - began, 5)
                    self.assertEqual(found[1], 2 if name == sync.LATEST else 1)
                    self.assertIn(why, logs.output[-1])

    def test_a_manifest_that_is_gone(self):
        """An older step is loaded, and the log says why."""
        e = self.engine()
        self.save(e, 1, DISK)
        self.save(e, 2, DISK)
        os.unlink(os.path.join(self.dir, ".dlrover/2.json"))
        with self.assertLogs("dlrover.ckpt", "WARNING") as logs:
            self.assertEqual(self.loaded(e, "disk"), ("disk", 1, 1.0))
        self.assertIn("names step 2, which has no manifest", logs.output[-1])

    def test_a_fifo_for_a_file(self):
        e = self.engine()
        self.save(e, 1, DISK)
        self.save(e, 2, DISK)
        _fifo(os.path.join(self.dir, sync.manifest(self.dir, 2)["files"][0]["path"]))
        with self.assertLogs("dlrover.ckpt", "WARNING") as logs:
            self.assertEqual(self.loaded(e, "disk"), ("disk", 1, 1.0))
        self.assertIn("not a regular file", logs.output[-1])

    def test_trackers(self):
        os.mkdir(self.dir)
        for text, step in ((b"7", 7), (b" 7\n", 7), (b"", None), (b"-7", None), (b"1_0", None), (b"\xc2\xb2", None), (b"9" * 30, None)):
            with open(os.path.join(self.dir, sync.LATEST), "wb") as f:
                f.write(text)
            got, wrong = sync.tracker(self.dir)
            self.assertEqual((got, bool(wrong)), (step, step is None), text)


class Intents(core.One):
    def begun(self, step):
        """A save that is interrupted after its intent. Returns its stage."""
        meta = self.engine()._meta(step, ())
        files = sync.write_shard(meta, [raw("%d/a" % step, b"x" * 10)])
        stage = os.path.join(self.dir, ".dlrover", "stage", meta["save"])
        self.m = sync._manifest(meta, files)
        sync._write_json(os.path.join(stage, "intent"), self.m)
        return stage

    def test_completed(self):
        self.begun(1)
        self.assertEqual(sync.recover(self.dir), [])
        self.assertEqual(sync.tracked(self.dir), 1)

    def test_with_temporary_names(self):
        """As an earlier version wrote them; the manifest has none."""
        stage = self.begun(1)
        for f in self.m["files"]:
            f["tmp"] = "/elsewhere"
        sync._write_json(os.path.join(stage, "intent"), self.m)
        self.assertEqual(sync.recover(self.dir), [])
        self.assertEqual(sync.tracked(self.dir), 1)
        self.assertNotIn("tmp", sync.manifest(self.dir, 1)["files"][0])

    def test_damaged(self):
        """It is set aside and told of once, and nothing outside is touched."""
        victim = os.path.join(self.top, "victim")

        def changed(**to):
            return lambda stage: sync._write_json(os.path.join(stage, "intent"), dict(self.m, **to))

        def file(**to):
            return lambda stage: changed(files=[dict(self.m["files"][0], **to)])(stage)

        for name, damage in {
            "empty": lambda stage: open(os.path.join(stage, "intent"), "wb").close(),
            "garbage": lambda stage: _garbage(os.path.join(stage, "intent")),
            "fifo": lambda stage: _fifo(os.path.join(stage, "intent")),
            "sparse": lambda stage: _sparse(os.path.join(stage, "intent")),
            "another save": changed(save="0" * 16),
            "no files": changed(files=[{}]),
            "a tracker elsewhere": changed(trackers=[{"path": victim, "text": "1"}]),
            "a file outside": file(path="../victim"),
            "a file that is gone": lambda stage: os.unlink(sync.temporary(os.path.join(self.dir, "1/a"), self.m["save"])),
        }.items():
            with self.subTest(name):
                shutil.rmtree(self.dir, True)
                with open(victim, "w") as f:
                    f.write("victim")
                stage = self.begun(1)
                damage(stage)
                (problem,) = sync.recover(self.dir)
                self.assertIn(stage + ".damaged", problem)
                self.assertTrue(os.path.lexists(stage + ".damaged/intent"))
                self.assertEqual(sync.recover(self.dir), [])
                self.assertIsNone(sync.tracked(self.dir))
                with open(victim) as f:
                    self.assertEqual(f.read(), "victim")
                e = self.engine()
                self.save(e, 1, DISK)
                self.assertEqual(self.loaded(e, "disk"), ("disk", 1, 1.0))

    def test_a_temporary_file_is_the_save_s_own(self):
        """Whatever the intent calls it."""
        victim = os.path.join(self.top, "victim")
        with open(victim, "w") as f:
            f.write("x" * 10)
        stage = self.begun(1)
        sync._write_json(os.path.join(stage, "intent"), dict(self.m, files=[dict(self.m["files"][0], tmp=victim)]))
        self.assertEqual(sync.recover(self.dir), [])
        self.assertTrue(os.path.exists(victim))
        self.assertEqual(sync.tracked(self.dir), 1)

    def test_of_a_newer_version(self):
        stage = self.begun(1)
        sync._write_json(os.path.join(stage, "intent"), dict(self.m, version=2))
        self.assertIn("version 2", sync.recover(self.dir)[0])
        self.assertTrue(os.path.exists(stage))


class Directories(core.One):
    def test_named_in_bytes(self):
        """As the functions of os take them."""
        self.dir = os.fsencode(self.dir)
        e = self.engine()
        self.save(e, 1, DISK)
        self.assertEqual(self.loaded(e, "disk"), ("disk", 1, 1.0))

    def test_deleted(self):
        """Without a daemon, too, it is made anew, with what is above it."""
        self.dir = os.path.join(self.dir, "run", "ckpts")
        e = self.engine()
        for step, gone in ((1, self.dir), (2, os.path.dirname(self.dir)), (3, self.dir)):
            self.save(e, step, DISK)
            self.assertEqual(e.wait(step, 10), step)
            shutil.rmtree(gone)

    def test_in_the_way(self):
        os.makedirs(os.path.join(self.dir, "1/rank_0.pt"))
        with self.assertRaisesRegex(sync.SaveFailed, "is a directory"):
            self.save(self.engine(), 1, DISK)
        self.assertFalse(os.listdir(os.path.join(self.dir, ".dlrover/stage")) if os.path.exists(os.path.join(self.dir, ".dlrover")) else [])


if __name__ == "__main__":
    unittest.main()
