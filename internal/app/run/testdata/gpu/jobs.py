"""The jobs of e2e.py: jobs.py NAME [ARGUMENT...]. Without a GPU they compute on the CPU, which is a rehearsal."""
import ctypes
import io
import json
import os
import signal
import statistics
import sys
import time
import warnings

BEGAN = time.time()

import torch
import torch.distributed as dist

IMPORTED = time.time()
RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")


def say(**words):
    print(json.dumps(words), flush=True)


def join(backend, **options):
    """nccl-shared is NCCL with several ranks on one GPU, which it takes only from ranks of different hosts."""
    if backend == "nccl-shared":
        backend = "nccl"
        os.environ["NCCL_HOSTID"] = "host-%d" % RANK
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend if CUDA else "gloo", **options)


def synchronize():
    if CUDA:
        torch.cuda.synchronize()


def occupy(seconds):
    """Keeps the device busy, and returns at once."""
    if CUDA:
        torch.cuda._sleep(int(seconds * 1.5e9))  # cycles
    else:
        time.sleep(seconds)


class Training:
    def __init__(self, width=1024):
        layers = [torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)]
        self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).to(DEVICE))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.width = width

    def step(self):
        loss = self.model(torch.randn(64, self.width, device=DEVICE)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def start(backend):
    """Says when it has come how far."""
    torch.zeros(1, device=DEVICE)
    synchronize()
    device = time.time()
    join(backend)
    group = time.time()
    training = Training()
    loss = training.step()
    synchronize()
    if RANK == 0:
        say(began=BEGAN, imported=IMPORTED, device=device, group=group, step=time.time(), loss=loss,
            on=str(DEVICE), gpu=torch.cuda.get_device_name() if CUDA else "", torch=torch.__version__,
            visible=os.environ.get("CUDA_VISIBLE_DEVICES", "-"))
    dist.destroy_process_group()


def train(backend, steps, pause="0.02"):
    join(backend)
    training = Training()
    for step in range(int(steps)):
        loss = training.step()
        if RANK == 0 and step == 5:
            say(trains=time.time(), loss=loss)
        time.sleep(float(pause))
    dist.destroy_process_group()


def crash(backend, mark):
    """The last rank of the first epoch fails when there is a file; rank 0 says when the second makes its first step."""
    join(backend)
    training = Training()
    for step in range(1 << 30):
        training.step()
        if not FIRST:
            if RANK == 0:
                say(again=time.time(), began=BEGAN, imported=IMPORTED, failed=float(open(mark).read()))
            break
        if step == 5 and RANK == 0:
            say(trains=time.time())
        if RANK == WORLD - 1 and os.path.exists(mark + ".go"):
            with open(mark, "w") as f:
                f.write(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------
# Failures
# ---------------------------------------------------------------------------------------------------------------------

STORES_TO_NOWHERE = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry nowhere()
{
    .reg .b64 %a;
    .reg .b32 %v;
    mov.u64 %a, 64;
    mov.u32 %v, 1;
    st.global.u32 [%a], %v;
    ret;
}
\0"""


def store_to_nowhere():
    cuda = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    torch.zeros(1, device=DEVICE)  # makes the context
    for code in (cuda.cuModuleLoadData(ctypes.byref(module), STORES_TO_NOWHERE),
                 cuda.cuModuleGetFunction(ctypes.byref(function), module, b"nowhere"),
                 cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None)):
        assert code == 0, code


def fail(how):
    if how == "oom":
        kept = []
        while True:
            kept.append(torch.empty(8 << 30, dtype=torch.uint8, device=DEVICE))
    if how == "oom-at-once":
        torch.empty(1 << 42, dtype=torch.uint8, device=DEVICE)
    if how == "assert":
        torch.nn.functional.embedding(torch.tensor([7, 1 << 20], device=DEVICE), torch.zeros(8, 8, device=DEVICE))
        synchronize()
    if how == "illegal":
        store_to_nowhere()
        synchronize()
    if how == "illegal-in-training":  # CUDA reports it in a later call
        join("nccl")
        training = Training()
        training.step()
        store_to_nowhere()
        training.step()
    if how == "duplicate":
        join("nccl")
        dist.all_reduce(torch.ones(1, device=DEVICE))
        synchronize()
    if how == "no-device":
        torch.cuda.set_device(7)
    if how == "hidden":
        torch.zeros(1, device="cuda")
    sys.exit("it has not failed")


def peer(backend, how):
    """The last rank goes, and the others wait for it in a collective."""
    import datetime

    join(backend, timeout=datetime.timedelta(seconds=8 if how == "timeout" else 300))
    x = torch.ones(1 << 20, device=DEVICE)
    dist.all_reduce(x)
    synchronize()
    if RANK == WORLD - 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise ValueError("batch 17 is bad")
        if how == "illegal":
            store_to_nowhere()
        if how == "timeout":
            load_batch()
    dist.all_reduce(x)
    synchronize()


def hold(gib):
    """Holds memory until standard input ends."""
    kept = torch.empty(int(float(gib) * (1 << 30)), dtype=torch.uint8, device=DEVICE)
    synchronize()
    say(held=kept.numel(), pid=os.getpid())
    sys.stdin.read()


def count():
    say(count=torch.cuda.device_count() if CUDA else 0)


# ---------------------------------------------------------------------------------------------------------------------
# Hangs
# ---------------------------------------------------------------------------------------------------------------------


def load_batch():
    time.sleep(100000)


def wait_for_kernel():
    occupy(100000)
    synchronize()


def copy_result():
    occupy(100000)
    return torch.ones(1, device=DEVICE).item()


def wait_for_event():
    occupy(100000)
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def late_kernel():
    occupy(100000)  # and the host goes on to the collective


def another_collective():
    """Of gloo: NCCL ends such a pair of two ranks, with wrong data."""
    out = [torch.empty(LARGE, device=DEVICE) for _ in range(WORLD)]
    dist.all_gather(out, torch.ones(LARGE, device=DEVICE))
    synchronize()


LARGE = 1 << 22


def hang(case, backend, mark, wait="synchronize"):
    join(backend)
    training = Training(256)
    for step in range(1 << 30):
        training.step()
        if FIRST and step == 30:
            if RANK == WORLD - 1:
                with open(mark, "w") as f:
                    f.write(repr(time.time()))
                globals()[case]()
            x = torch.ones(LARGE, device=DEVICE)
            dist.all_reduce(x)
            if wait == "item":
                x[0].item()
            synchronize()
        if not FIRST and step == 30:
            say(again=time.time())
            break
        time.sleep(0.02)
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------


def kept(t):
    """Whether this PyTorch itself keeps such a tensor."""
    file = io.BytesIO()
    try:
        torch.save(t, file)
        file.seek(0)
        return compare(t, torch.load(file)) == 1
    except Exception:
        return False


def odd_state():
    """Every kind of tensor that there is on a device."""
    torch.manual_seed(7 + RANK)
    kinds = "float32 float64 float16 bfloat16 complex64 complex128 int8 int16 int32 int64 uint8 bool".split()
    kinds += [k for k in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu", "uint16", "uint64",
                          "float4_e2m1fn_x2", "complex32") if hasattr(torch, k)]
    state = {}
    for kind in kinds:
        bytes_ = torch.randint(0, 2 if kind == "bool" else 127, (3, 96), dtype=torch.uint8, device=DEVICE)
        if kept(bytes_.view(getattr(torch, kind))):
            state[kind] = bytes_.view(getattr(torch, kind))
    base = torch.randn(64, 96, device=DEVICE)
    state["transposed"], state["strided"], state["base"] = base.t(), base[::2, 5:50:3], base
    state["expanded"] = torch.randn(1, 8, device=DEVICE).expand(16, 8)
    state["scalar"], state["empty"] = torch.tensor(3.5, device=DEVICE), torch.empty(0, 4, device=DEVICE)
    state["channels last"] = torch.randn(2, 3, 8, 8, device=DEVICE).to(memory_format=torch.channels_last)
    for name, t in ("conjugate", lambda c: c.conj()), ("negative", lambda c: c.conj().imag):
        made = t(torch.randn(5, dtype=torch.complex64, device=DEVICE))
        if kept(made):
            state[name] = made
    state["parameter"] = torch.nn.Parameter(torch.randn(33, 7, device=DEVICE))
    state["large"] = torch.randn(3 << 20, device=DEVICE, dtype=torch.float32)
    state["on the host"] = torch.randn(100)
    if CUDA:
        state["pinned"] = torch.randn(1000).pin_memory()
        state["generator"] = torch.cuda.get_rng_state()
    layers = [torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 8)]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    model[2].weight.data = model[2].weight.data.bfloat16().float()
    optimizer = torch.optim.AdamW(model.parameters(), **({"fused": True} if CUDA else {}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has another name now
        scaler = torch.cuda.amp.GradScaler(enabled=CUDA)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(16, 256, device=DEVICE)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    state.update(model=model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict(), step=3)
    return state


def bits(t):
    t = t.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return ctypes.string_at(t.data_ptr(), t.numel() * t.element_size()) if t.numel() else b""


def compare(a, b, at=""):
    """Counts the tensors of two states, which have to be the same to the last bit."""
    if isinstance(a, torch.Tensor):
        same = (a.dtype, a.shape, a.stride(), type(a)) == (b.dtype, b.shape, b.stride(), type(b))
        assert same, "%s: %s %s %s, %s %s %s" % (at, a.dtype, a.shape, a.stride(), b.dtype, b.shape, b.stride())
        assert bits(a) == bits(b), at + ": other bits"
        return 1
    if isinstance(a, dict):
        assert list(a) == list(b), at
        return sum(compare(a[k], b[k], "%s/%s" % (at, k)) for k in a)
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b), at
        return sum(compare(x, y, at + "[]") for x, y in zip(a, b))
    assert a == b, "%s: %r, %r" % (at, a, b)
    return 0


def ckpt(directory):
    """Saves a state to memory and to disk, is killed, and compares what comes back with torch.save's."""
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

    checkpointer = DdpCheckpointer(directory)
    expected = os.path.join(directory, "expected.pt")
    if not FIRST:
        loaded = checkpointer.load_checkpoint()
        wanted = torch.load(expected, map_location="cpu", weights_only=False)
        n = compare(wanted, loaded)
        assert loaded["transposed"].data_ptr() == loaded["base"].data_ptr(), "views share their storage"
        for k, v in loaded.items():
            if isinstance(v, torch.Tensor):
                assert bits(v.to(DEVICE)) == bits(wanted[k]), k
        say(equal=n)
        return
    state = odd_state()
    say(kinds=[k for k in state])
    assert checkpointer.save_checkpoint(1, state, storage_type=StorageType.DISK)
    checkpointer.wait_latest_checkpoint()
    n = compare(state, torch.load(os.path.join(directory, "1", "rank_0.pt"), weights_only=False))
    say(on_disk=n)
    for _ in range(3):  # the layout is known; the contents are those of work that the device has not done yet
        occupy(0.2)
        state["large"].mul_(1.5)
        state["model"]["0.weight"].add_(1)
        assert checkpointer.save_checkpoint(2, state, storage_type=StorageType.MEMORY)
    torch.save(state, expected)
    state["large"].zero_()  # after the save
    synchronize()
    os.kill(os.getpid(), signal.SIGKILL)


def fsdp(directory, mark):
    """Saves shards to memory, makes two more steps, is killed, and makes them again from what was saved."""
    from torch.distributed.fsdp import fully_shard

    from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpShardCheckpointer, StorageType

    join("nccl-shared")
    torch.manual_seed(7)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3))).to(DEVICE)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=CUDA)
    checkpointer = FsdpShardCheckpointer(directory)

    def step(seed):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        loss = model(torch.randn(32, 256, device=DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    if FIRST:
        for seed in range(3):
            step(seed)
        assert checkpointer.save_checkpoint(3, model, optimizer, storage_type=StorageType.MEMORY)
        with open(mark + str(RANK), "w") as f:
            json.dump([step(3), step(4)], f)
        dist.barrier()
        synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    step(99)  # the optimizer's state is there
    checkpointer.load_checkpoint(model, optimizer)
    with open(mark + str(RANK)) as f:
        wanted = json.load(f)
    again = [step(3), step(4)]
    assert again == wanted, (again, wanted)
    if RANK == 0:
        say(losses=again)
    dist.destroy_process_group()


def timed(work):
    synchronize()
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def large_state(gib):
    """A model in bfloat16 and the state of its Adam, on the device."""
    layers, state = max(1, int(gib * 1024 / 160)), {}
    for i in range(layers):
        state["layer.%d" % i] = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
        state["exp_avg.%d" % i] = torch.randn(4096, 4096, device=DEVICE)
        state["exp_avg_sq.%d" % i] = torch.randn(4096, 4096, device=DEVICE)
    return state


def rates(directory, memory, gib):
    """How long saves and loads take, ours and torch.save's."""
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

    checkpointer = DdpCheckpointer(directory)
    plain = {"memory": os.path.join(memory, "plain.pt"), "disk": os.path.join(directory, "plain.pt")}
    if not FIRST:
        restored = {}
        load = timed(lambda: restored.update(checkpointer.load_checkpoint()))
        device = timed(lambda: restored.update({k: v.to(DEVICE) for k, v in restored.items()}) or synchronize())
        del restored
        theirs = {}
        for name, path in plain.items():
            theirs["torch.load from %s to the device" % name] = timed(
                lambda: torch.load(path, map_location=DEVICE) and synchronize())
        say(**{"load": load, "to the device": device}, **theirs)
        os.unlink(plain["memory"])
        return
    state = large_state(float(gib))
    size = sum(t.numel() * t.element_size() for t in state.values())
    first = timed(lambda: checkpointer.save_checkpoint(1, state, storage_type=StorageType.MEMORY))
    saves = []
    for step in range(2, 8):
        time.sleep(2)  # steps of training, in which the next buffer is made
        saves.append(timed(lambda: checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY)))
    step = timed(lambda: checkpointer.save_checkpoint(20, state, storage_type=StorageType.DISK))
    disk = timed(checkpointer.wait_latest_checkpoint)
    theirs = {}
    for name, path in plain.items():
        theirs["torch.save to %s" % name] = timed(lambda: torch.save(state, path))
        with open(path, "rb") as f:
            theirs["its fsync on %s" % name] = timed(lambda: os.fsync(f.fileno()))
    say(bytes=size, first=first, saves=saves, median=statistics.median(saves), **{
        "disk save": step, "until it is on disk": disk}, **theirs)
    checkpointer.save_checkpoint(21, state, storage_type=StorageType.MEMORY)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    globals()[sys.argv[1].replace("-", "_")](*sys.argv[2:])
