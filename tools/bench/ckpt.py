# A worker that measures checkpoints: ckpt.py SIDE ROW DIRECTORY OUT REPETITIONS MIB
# SIDE is dlrover-run, torch.save (with fsync) or DLRover, ROW a function below, OUT gets a JSON object of medians.
import ctypes, json, mmap, os, socket, statistics, sys, threading, time
import torch

GIB = 1 << 30
BLOCK = 8 << 20
PATIENCE = 20.0  # seconds, for the disk
now = time.monotonic


def timed(f, *args):
    begin = now()
    f(*args)
    return now() - begin


class Flash:
    """A DdpCheckpointer: ours or DLRover's, which have the same interface."""

    blocks = False  # until the disk has it

    def __init__(self, directory, method):
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        self.checkpointer = DdpCheckpointer(directory)
        self.engine = self.checkpointer._engine
        self.kinds = {False: StorageType.MEMORY, True: StorageType.DISK}
        self.stored = True
        inner = getattr(self.engine, method)

        def recorded(*args):  # the public method does not tell whether it skipped
            self.stored = inner(*args)
            return self.stored

        setattr(self.engine, method, recorded)

    def save(self, step, state, disk=False):
        return timed(lambda: self.checkpointer.save_checkpoint(step, state, storage_type=self.kinds[disk]))

    def load(self):
        return self.checkpointer.load_checkpoint()

    def settle(self):
        """Waits until saves are warm."""


class Ours(Flash):
    def __init__(self, directory):
        super().__init__(directory, "save")
        from dlrover_ckpt import copying

        fill = copying.fill

        def timed_fill(*args):
            self.copied = timed(fill, *args)

        copying.fill = timed_fill

    def settle(self):
        self.engine._pool.prepared(30)

    def daemon(self):
        """The daemon's process."""
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(os.environ["DLROVER_CKPT_RUNTIME"] + "/sock")
            s.sendall(b'{"op":"hello","v":1}\n')
            return json.loads(s.makefile().readline())["pid"]


class DLRover(Flash):
    def __init__(self, directory):
        super().__init__(directory, "save_to_memory")


class ByHand:
    blocks = True
    stored = True

    def __init__(self, directory):
        self.directory = directory

    def save(self, step, state, disk=False):
        return timed(self._save, step, state)

    def _save(self, step, state):
        self._durable("state.pt", lambda f: torch.save(state, f))
        self._durable("dlrover_latest.txt", lambda f: f.write(b"%d" % step))

    def _durable(self, name, write):
        path = os.path.join(self.directory, name)
        with open(path + ".tmp", "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.rename(path + ".tmp", path)

    def load(self):
        path = os.path.join(self.directory, "state.pt")
        return torch.load(path) if os.path.exists(path) else {}

    def settle(self):
        pass


class Training:
    """A model and its Adam; their state has MIB MiB, in three equal parts."""

    def __init__(self, mib):
        layers = 16
        width = max(1, int((mib * (1 << 20) / 12 / layers) ** 0.5))
        make = torch.nn.utils.skip_init  # random numbers take longer than what is measured
        self.model = torch.nn.Sequential(*[make(torch.nn.Linear, width, width) for _ in range(layers)])
        self.adam = torch.optim.Adam(self.model.parameters())
        for p in self.model.parameters():
            p.data.fill_(1.0)
            p.grad = torch.full_like(p, 1e-3)

    def run(self, seconds):
        end = now() + seconds
        self.adam.step()
        while now() < end:
            self.adam.step()

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.adam.state_dict()}


def plain(mib):
    """A state of 16 tensors, each with its own value in every element."""
    return {"tensor.%d" % i: torch.full((mib << 14,), float(i)) for i in range(16)}


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [t for c in children for t in tensors(c)]


def nbytes(value):
    return sum(t.numel() * t.element_size() for t in tensors(value))


class Mapping:
    """Prefaulted shared memory, to compare with: what a copy, and the disk, can do at best."""

    def __init__(self, size):
        self.size = -(-size // BLOCK) * BLOCK
        self.memory = mmap.mmap(-1, self.size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        ctypes.memset(self.address, 1, self.size)

    def copy(self, sources, threads):
        at, work, chunk = self.address, [], 32 << 20
        for t in sources:
            n = t.numel() * t.element_size()
            work += [(at + o, t.data_ptr() + o, min(chunk, n - o)) for o in range(0, n, chunk)]
            at += n
        left = iter(work)

        def run():
            for args in left:
                ctypes.memmove(*args)

        others = [threading.Thread(target=run) for _ in range(threads - 1)]
        for t in others:
            t.start()
        run()
        for t in others:
            t.join()

    def write(self, path):
        """GiB/s of O_DIRECT and fsync into a new file."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            begin = now()
            with memoryview(self.memory) as view:
                for at in range(0, self.size, BLOCK):
                    os.pwrite(fd, view[at:at + BLOCK], at)
            os.fsync(fd)
            return self.size / GIB / (now() - begin)
        finally:
            os.close(fd)
            os.unlink(path)


def cpu_seconds(pid):
    return time.clock_gettime(~pid << 3 | 2)  # the clock of the process, with the threads that have ended


def tracked(directory):
    try:
        with open(os.path.join(directory, "dlrover_latest.txt")) as f:
            return int(f.read() or -1)
    except FileNotFoundError:
        return -1


def on_disk(directory, step):
    """Waits until the tracker names the step."""
    end = now() + PATIENCE
    while tracked(directory) != step:
        if now() > end:
            raise TimeoutError("step %d did not get to the disk within %g s" % (step, PATIENCE))
        time.sleep(0.001)


# Rows


def save(side, directory, repetitions, mib):
    training = Training(mib)
    side = side(directory)
    side.load()
    training.run(1)
    state = training.state()
    gib = nbytes(state) / GIB
    out = {"first": gib / side.save(1, state)}
    side.settle()
    if not isinstance(side, Ours):
        rounds = 1 if side.blocks else 2 * repetitions
        out["later"] = gib / statistics.median(side.save(2 + i, state) for i in range(rounds))
        return out
    mapping, sources = Mapping(nbytes(state)), tensors(state)
    for step in range(2, 6):  # each buffer has been used
        side.save(step, state)
    blocked, copies = {1: [], 2: []}, {1: [], 2: []}
    for i in range(repetitions):
        for threads in (1, 2):
            side.engine.threads = threads
            copies[threads].append(timed(mapping.copy, sources, threads))
            blocked[threads].append(side.save(6 + 2 * i + threads, state))
    for threads, key in (1, "one"), (2, "later"):
        out[key] = gib / statistics.median(blocked[threads])
        out[key + "_memcpy"] = gib / statistics.median(copies[threads])
        out[key + "_share"] = 100 * statistics.median(c / b for c, b in zip(copies[threads], blocked[threads]))
    return out


def flush(side, directory, repetitions, mib):
    side, state = side(directory), plain(mib)
    gib = nbytes(state) / GIB
    step = 0

    def next_save(disk=False):
        nonlocal step
        step += 1
        return side.save(step, state, disk)

    if side.blocks:
        return {"rate": gib / next_save()}
    next_save()
    side.settle()
    for _ in range(4):
        next_save()
    mine = isinstance(side, Ours)
    repetitions = repetitions if mine else 1
    for _ in range(3 if mine else 0):  # each buffer once: the daemon maps its memory with the first flush
        next_save(True)
        on_disk(directory, step)
    rates, shares, direct, cpu = [], [], [], []
    mapping = Mapping(nbytes(state)) if mine else None
    for _ in range(repetitions):
        if mine:
            direct.append(mapping.write(os.path.join(directory, "direct")))
            before = cpu_seconds(side.daemon())
        next_save(True)
        begin = now()
        on_disk(directory, step)
        rates.append(gib / (now() - begin))
        if mine:
            time.sleep(0.02)
            cpu.append((cpu_seconds(side.daemon()) - before) / gib)
            shares.append(100 * rates[-1] / direct[-1])
    out = {"rate": statistics.median(rates)}
    if mine:
        out.update(share=statistics.median(shares), direct=statistics.median(direct), cpu=statistics.median(cpu))
    out.update(beside(next_save, side, directory, lambda: step, repetitions))
    return out


def beside(next_save, side, directory, current, repetitions):
    """Memory saves while a flush runs: how many, how many were skipped, how much longer they took than as many right after
    it, and whether all flushed saves got to the disk."""
    took, waits, quiet, counts, skipped, kept = [], [], [], [], 0, True
    for _ in range(repetitions):
        next_save(True)
        flushed, before, end = current(), len(took), now() + PATIENCE
        while tracked(directory) != flushed and now() < end:
            took.append(next_save())
            waits.append(took[-1] - getattr(side, "copied", took[-1]))
            skipped += not side.stored
            time.sleep(0.02)
        counts.append(len(took) - before)
        kept = tracked(directory) == flushed
        if not kept:
            break
        for _ in range(counts[-1]):
            quiet.append(next_save())
            time.sleep(0.02)
    out = {"saves": statistics.median(counts), "skipped": skipped / len(counts), "none_skipped": float(skipped == 0),
           "kept": float(kept)}
    if took and quiet:
        out.update(extra=max(0, statistics.median(took) - statistics.median(quiet)), most=max(0, max(took) - max(quiet)))
    if took and isinstance(side, Ours):
        out["wait"] = max(waits)
    return out


def small(side, directory, repetitions, mib):
    count = 32 * mib
    state = {"tensor.%d" % i: torch.full((1024,), float(i)) for i in range(count)}
    side = side(directory)

    def once(step):
        return side.save(step, {k: t.detach() for k, t in state.items()})  # as state_dict() does

    if side.blocks:
        return {"blocked": once(1)}
    once(1)
    side.settle()
    return {"blocked": statistics.median([once(step) for step in range(2, 8 + repetitions)][6:])}


def clear(state):
    for t in state.values():
        t.zero_()


def load(side, directory, repetitions, mib):
    """Saves and fails; the next incarnation loads. DLRover's memory is that of a child, so it loads in the same process."""
    room, first = plain(mib), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if not first:
        clear(room)
    checkpointer = side(directory)
    if first:
        checkpointer.save(1, room)
        if side is not DLRover:
            os._exit(1)
        clear(room)
    begin = now()
    state = checkpointer.load()
    loaded = now()
    for name, t in room.items():
        t.copy_(state[name])
    copied = now()
    for i, t in enumerate(room.values()):
        assert t[0] == t[-1] == i and len(state) == len(room), "another state came back"
    return {"load": loaded - begin, "copied": copied - begin}


def main():
    side, row, directory, out = sys.argv[1:5]
    os.makedirs(directory, exist_ok=True)
    torch.set_num_threads(1)
    sides = {"dlrover-run": Ours, "torch.save": ByHand, "DLRover": DLRover}
    rows = {"save": save, "flush": flush, "small": small, "load": load}
    values = rows[row](sides[side], directory, int(sys.argv[5]), int(sys.argv[6]))
    with open(out, "w") as f:
        json.dump(values, f)


if __name__ == "__main__":  # DLRover's saver is spawned, and imports this again
    main()
    sys.stdout.flush()
    if "DLROVER_CKPT_RUNTIME" not in os.environ:
        os._exit(0)  # DLRover's threads would keep the process
