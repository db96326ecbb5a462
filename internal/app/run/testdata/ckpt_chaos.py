"""Saves a shard of each rank at every step, and checks every byte of what it loads.

ckpt_chaos.py MARKS CHECKPOINTS PAUSE

Every step goes to memory, every 7th to disk, until MARKS/go exists. The content of a file is a pseudo-random function
of step, rank and world, the name that rank 0 gives to each start of all ranks. Each rank adds these lines to MARKS/log:

    start <rank> <pid> <step> <source> <world that saved it> <world> <epoch>
    saved <rank> <step> <1: yes, 0: skipped> <segments that wait for the disk> <world>
    wrong <rank> <what>
"""

import hashlib
import logging
import os
import sys
import time

import torch.distributed as dist
from dlrover_ckpt.engine import Engine, StorageType
from dlrover_ckpt.image import raw

logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d rank " + os.environ["RANK"] + " %(message)s", datefmt="%H:%M:%S")
SMALLEST, DOUBLINGS, LARGEST = 4 << 10, 10, 2 << 20


class Wrong(Exception):
    pass


class KeepLatest:
    def retention(self):
        return {"keep_latest": 3}


def content(step, rank, world):
    head = b"%d %d %s\n" % (step, rank, world.encode())
    h = hashlib.sha256(head).digest()
    size = min((SMALLEST << h[0] % DOUBLINGS) + h[1], LARGEST)
    return head + hashlib.shake_128(head).digest(size - len(head))


def check(data, step, rank):
    """Returns the world that saved data, the whole file of a rank."""
    head = data.partition(b"\n")[0].decode("utf-8", "replace").split()
    if head[:2] != [str(step), str(rank)] or len(head) != 3:
        raise Wrong("step %d begins with %r" % (step, head))
    if data != content(step, rank, head[2]):
        raise Wrong("step %d of world %s is torn" % (step, head[2]))
    return head[2]


def load(engine, rank):
    """The step, where it was, and the world that saved it."""
    found = engine.load()
    if found is None:
        return 0, "nothing", "-"
    path = "%d/rank_%d.bin" % (found.step, rank)
    if found.source == "memory":
        data = bytes(found.files[path])
    else:
        with open(os.path.join(found.dir, path), "rb") as f:
            data = f.read()
    return found.step, found.source, check(data, found.step, rank)


def gather(value):
    out = []
    dist.all_gather_object(out, value)
    return out


def main():
    marks, directory, pause = sys.argv[1], sys.argv[2], float(sys.argv[3])
    rank, size, epoch = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["DLROVER_CKPT_EPOCH"]
    log = os.open(os.path.join(marks, "log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def say(*words):
        os.write(log, (" ".join(map(str, words)) + "\n").encode())

    try:
        dist.init_process_group(os.path.join(marks, "%s-%s" % (epoch, os.environ["MASTER_PORT"])))
        engine = Engine(directory, "chaos", shard=rank, shards=size, primary=True, deletion_strategy=KeepLatest())
        world = gather(os.urandom(4).hex())[0]
        step, source, saved_by = load(engine, rank)
        say("start", rank, os.getpid(), step, source, saved_by, world, epoch)
        if len(set(gather((step, source, saved_by)))) != 1:
            raise Wrong("mixed: %s" % gather((rank, step, source, saved_by)))
        while not gather(os.path.exists(os.path.join(marks, "go")))[0]:
            step += 1
            kind = StorageType.MEMORY if step % 7 else StorageType.DISK
            done = engine.save(step, [raw("%d/rank_%d.bin" % (step, rank), content(step, rank, world))], kind)
            with engine._pool.guard:
                pending = sum(s.pending for s in engine._pool._slots(engine._pool.use(engine.dir)))
            say("saved", rank, step, int(done), pending, world)
            time.sleep(pause)
        step += 1
        engine.save(step, [raw("%d/rank_%d.bin" % (step, rank), content(step, rank, world))], StorageType.DISK)
        engine.wait(timeout=60)
    except ConnectionError as e:
        logging.info("%s", e)
        sys.exit(1)
    except Exception as e:
        say("wrong", rank, repr(e).replace("\n", " "))
        raise


main()
