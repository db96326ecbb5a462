"""Trains with DistributedDataParallel, saves to memory at every step, and says when it is how far.

warm.py LOG CHECKPOINTS STEPS PAUSE

It ends after STEPS, or when LOG.go exists. Lines of LOG, times of CLOCK_MONOTONIC in ns:

    begun|imported|loaded|step <rank> <restart count> <pid> <time> <step> <loss, in hexadecimal>
"""
import os
import sys
import time

began = time.monotonic_ns()
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def say(what, at=None, step=-1, loss=0.0):
    os.write(log, ("%s %d %s %d %d %d %s\n" % (what, rank, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.getpid(),
                                               at or time.monotonic_ns(), step, float(loss).hex())).encode())


say("begun", began)
import io  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

say("imported")
try:
    from dlrover_ckpt.engine import Engine, StorageType
    from dlrover_ckpt.image import raw
except ImportError:  # under torchrun
    Engine = None


class Files:
    """Checkpoints for a launcher that has none: a file of each rank, for two steps."""

    def __init__(self, directory):
        self.directory = directory

    def save(self, step, data):
        path = os.path.join(self.directory, "%d.%d" % (rank, step % 2))
        with open(path + ".new", "wb") as f:
            f.write(data)
        os.replace(path + ".new", path)

    def load(self):
        found = {}
        for i in range(2):
            try:
                with open(os.path.join(self.directory, "%d.%d" % (rank, i)), "rb") as f:
                    state = torch.load(io.BytesIO(f.read()))
                    found[state["step"]] = state
            except OSError:
                pass
        everyone = [None] * size
        dist.all_gather_object(everyone, set(found))
        common = set.intersection(*everyone)
        return found[max(common)] if common else None


class Memory:
    """Checkpoints of dlrover-run."""

    def __init__(self, directory):
        self.engine = Engine(directory, "warm", shard=rank, shards=size, primary=rank == 0)

    def save(self, step, data):
        self.engine.save(step, [raw("%d/rank_%d.bin" % (step, rank), data)], StorageType.MEMORY)

    def load(self):
        found = self.engine.load()
        if found is None:
            return None
        path = "%d/rank_%d.bin" % (found.step, rank)
        if found.source == "memory":
            return torch.load(io.BytesIO(bytes(found.files[path])))
        return torch.load(os.path.join(found.dir, path))


def in_order(_, bucket):
    """The mean of a bucket of gradients, added up by rank: the same to the bit whatever the buckets are, which are others in
    the first step after a start."""
    parts = [torch.empty_like(bucket.buffer()) for _ in range(size)]
    dist.all_gather(parts, bucket.buffer())
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    future = torch.futures.Future()
    future.set_result(total / size)
    return future


def main():
    directory, steps, pause = sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    checkpoints = Memory(directory) if Engine else Files(directory)
    state, step = checkpoints.load(), 0
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    say("loaded", step=step)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, in_order)
    while step < steps:
        step += 1
        batch = torch.randn(32 * size, 16, generator=torch.Generator().manual_seed(step))[rank::size]
        loss = (ddp(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        out = io.BytesIO()
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, out)
        checkpoints.save(step, out.getvalue())
        say("step", step=step, loss=mean.item())
        stop = torch.tensor([float(os.path.exists(sys.argv[1] + ".go"))])
        dist.broadcast(stop, 0)
        if stop.item():
            break
        time.sleep(pause)
    dist.barrier()
    dist.destroy_process_group()


main()
