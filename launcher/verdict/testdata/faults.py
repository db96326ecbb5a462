"""Rank BAD of a job produces the fault argv[1]; the other ranks go on with collectives of gloo, as in training.

The variables: BAD (rank, or "all"), RECORD=1 (torch's @record), TIMEOUT (seconds of a collective). What needs hardware
that is not there is a stand-in: the error is raised with a text whose parts are read in the library at hand.
"""
import ctypes
import glob
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BAD = os.environ.get("BAD", "1") == "all" or int(os.environ.get("BAD", "1")) == RANK
TIMEOUT = float(os.environ.get("TIMEOUT", "60"))
DIR = os.environ["DIR"]


def library(pattern, *parts):
    """Makes sure that a text is the library's own."""
    import torch
    where = os.path.dirname(torch.__file__)
    for path in glob.glob(where + "/lib/" + pattern) + glob.glob(where + "/../nvidia/*/lib/" + pattern):
        with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if all(data.find(p.encode()) >= 0 for p in parts):
                return "".join(parts)
    os._exit(99)


def machine_code(code):
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    ctypes.CFUNCTYPE(None)(address)()


def native(name, source):
    """Loads C++ that is compiled once for all ranks."""
    path = os.path.join(DIR, "%s.%d.so" % (name, RANK))
    command = ["g++", "-shared", "-fPIC", "-pthread", "-o", path, "-x", "c++", "-"]
    subprocess.run(command, input=source.encode(), check=True)
    return ctypes.CDLL(path)


def limit(what, value):
    import resource
    resource.setrlimit(getattr(resource, what), (value, value))


def loader(collate=None, **options):
    import torch
    from torch.utils.data import DataLoader

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            return collate(i) if collate else torch.zeros(256, 256)

    return DataLoader(Data(), batch_size=4, num_workers=2, **options)


def child(i, how):
    if how == "raise":
        raise ValueError("bad shard in process %d" % i)
    if how == "segv":
        ctypes.string_at(0)
    if how == "exit":
        sys.exit(3)
    time.sleep(60)


# Faults of one rank in the middle of training, by name; Python's, then the machine's, then PyTorch's.
def user_exception():
    raise ValueError("bad batch: 17 samples, 16 expected")


def key_error():
    return {}["learning_rate"]


def chained():
    try:
        user_exception()
    except ValueError as e:
        raise RuntimeError("step 3 failed") from e


def assertion():
    assert TIMEOUT < 0, "loss went up"


def nan_check():
    raise FloatingPointError("loss is nan at step 3")


def anomaly():
    import torch
    with torch.autograd.detect_anomaly():
        x = torch.zeros(1, requires_grad=True)
        (x.sqrt() * 0).sum().backward()


def sys_exit():
    sys.exit(3)


def sys_exit_text():
    sys.exit("the data set is empty")


def os_exit():
    os._exit(7)


def recursion():
    recursion()


def segv():
    ctypes.string_at(0)


def segv_faulthandler():
    import faulthandler
    faulthandler.enable()
    ctypes.string_at(0)


def stack_overflow():
    native("overflow", 'extern "C" int f(int n) { volatile char b[4096]; b[0] = n; return f(n + 1) + b[0]; }').f(0)


def ill():
    machine_code(b"\x0f\x0b")


def fpe():
    machine_code(b"\x31\xc9\xb8\x01\x00\x00\x00\x99\xf7\xf9\xc3")


def bus_file():
    with tempfile.TemporaryFile() as f:
        f.truncate(4096)
        page = mmap.mmap(f.fileno(), 4096)
        f.truncate(0)
        page[0] = 1


def abort():
    os.abort()


def heap():
    libc = ctypes.CDLL(None)
    libc.free.argtypes = [ctypes.c_void_p]
    libc.free(ctypes.addressof(ctypes.create_string_buffer(64)) + 8)


def c_assert():
    native("assertion", '#include <cassert>\nextern "C" void f(int n) { assert(n > 0 && "n of step"); }').f(0)


def cpp_exception():
    native("thrown", '#include <stdexcept>\n#include <thread>\nextern "C" void f() { std::thread([] { throw '
           'std::runtime_error("tokenizer: bad vocabulary"); }).join(); }').f()


def cpp_bad_alloc():
    native("bad", '#include <new>\n#include <thread>\nextern "C" void f() { std::thread([] { throw '
           'std::bad_alloc(); }).join(); }').f()


def fatal_python():
    ctypes.pythonapi.Py_FatalError(b"the interpreter is broken")


def kill9():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_term():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def keyboard():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def cpu_limit():
    limit("RLIMIT_CPU", int(time.process_time()) + 1)
    while True:
        pass


def oom_kernel():
    hoard = []
    while True:
        hoard.append(bytearray(os.urandom(1 << 20)) * 16)


def oom_loader():
    def grow(i):
        oom_kernel()
    for _ in loader(grow):
        pass


def memory_error():
    limit("RLIMIT_AS", 16 << 30)
    return bytearray(64 << 30)


def torch_memory():
    import torch
    return torch.empty(1 << 46)


def numpy_memory():
    import numpy
    return numpy.zeros((1 << 40, 1 << 8))


def open_files():
    limit("RLIMIT_NOFILE", 256)
    return [socket.socket() for _ in range(300)]


def disk_write():
    with open(os.path.join(os.environ["DISK"], "out.%d" % RANK), "wb") as f:
        f.write(b"x" * (8 << 20))


def disk_save():
    import torch
    torch.save({"w": torch.zeros(2 << 20)}, os.path.join(os.environ["DISK"], "model.pt"))


def file_limit():
    """What ulimit -f allows is used up."""
    limit("RLIMIT_FSIZE", 1 << 20)
    with open(os.path.join(DIR, "large.%d" % RANK), "wb") as f:
        f.write(b"x" * (8 << 20))


def file_limit_save():
    import torch
    limit("RLIMIT_FSIZE", 1 << 20)
    torch.save({"w": torch.zeros(2 << 20)}, os.path.join(DIR, "large.%d.pt" % RANK))


def shm_loader():
    import torch
    for _ in loader(lambda i: torch.ones(1 << 20)):
        pass


def shm_share():
    import torch
    torch.ones(16 << 20).share_memory_()


def address_in_use():
    first, second = socket.socket(), socket.socket()
    first.bind(("127.0.0.1", 0))
    first.listen()
    second.bind(first.getsockname())


def store_in_use():
    import torch.distributed as dist
    taken = socket.socket()
    taken.bind(("0.0.0.0", 0))
    taken.listen()
    dist.TCPStore("127.0.0.1", taken.getsockname()[1], 1, True)


def permission():
    os.seteuid(65534)
    open("/etc/shadow")


def missing_file():
    open("/data/train/shard-00017.tar")


def missing_module():
    import flash_attention_of_nobody  # noqa: F401


def missing_name():
    from collections import NoSuchName  # noqa: F401


def missing_library():
    ctypes.CDLL("libcudnn_of_nobody.so.9")


def undefined_symbol():
    native("undefined", 'extern "C" void not_anywhere(); extern "C" void f() { not_anywhere(); }').f()


def wrong_version():
    from transformers.utils.versions import require_version
    require_version("torch>=99.0", "this example needs a newer torch")


def hf_arguments():
    from dataclasses import dataclass
    from transformers import HfArgumentParser

    @dataclass
    class Arguments:
        lr: float = 0.1
    sys.argv = ["train.py", "--learning-rte=1"]
    HfArgumentParser(Arguments).parse_args_into_dataclasses()


def hf_missing():
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig
    AutoConfig.from_pretrained("/models/llama-of-nobody")


def hf_unknown():
    """A name, and not a path, of which nothing is in the cache."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HOME"] = DIR
    from transformers import AutoConfig
    AutoConfig.from_pretrained("nobody/llama-of-nobody")


def argparse():
    import argparse
    p = argparse.ArgumentParser("train.py")
    p.add_argument("--lr", type=float, required=True)
    p.parse_args(["--lr=fast"])


def corrupt_safetensors():
    from safetensors.torch import load_file
    path = os.path.join(DIR, "broken.safetensors")
    with open(path, "wb") as f:
        f.write(b"\xff" * 64)
    load_file(path)


def corrupt_checkpoint():
    import torch
    path = os.path.join(DIR, "broken.%d.pt" % RANK)
    torch.save({"w": torch.zeros(1000)}, path)
    os.truncate(path, 2000)
    torch.load(path)


def state_mismatch():
    import torch
    torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(3, 2).state_dict())


def state_keys():
    """A checkpoint of another model, as all ranks load it."""
    import torch
    path = os.path.join(DIR, "other.%d.pt" % RANK)
    torch.save({"encoder.weight": torch.zeros(2, 2), "encoder.bias": torch.zeros(2)}, path)
    torch.nn.Linear(2, 2).load_state_dict(torch.load(path))


def shape_mismatch():
    import torch
    return torch.zeros(2, 3) @ torch.zeros(4, 5)


def loader_raises():
    def bad(i):
        raise ValueError("cannot decode image %d" % i)
    for _ in loader(bad):
        pass


def loader_missing_file():
    for _ in loader(lambda i: open("/data/img/%d.jpg" % i)):
        pass


def loader_segv():
    for _ in loader(lambda i: ctypes.string_at(0)):
        pass


def loader_killed():
    for _ in loader(lambda i: os.kill(os.getpid(), signal.SIGKILL)):
        pass


def loader_timeout():
    for _ in loader(lambda i: time.sleep(30), timeout=1):
        pass


def spawn(how):
    import torch.multiprocessing as mp
    mp.spawn(child, (how,), nprocs=2)


def slow_teardown():
    """Fails, says so, closes its connections, and takes its time to end."""
    import atexit
    import torch.distributed as dist
    atexit.register(time.sleep, 20)
    atexit.register(dist.destroy_process_group)
    raise ValueError("bad batch, slowly")


def slow_thread():
    """Fails and says so, but a thread that nobody has told keeps the interpreter from ending."""
    import threading
    threading.Thread(target=time.sleep, args=(8,)).start()
    raise ValueError("bad batch, and a thread goes on")


def late(how):
    """The launcher sees the end a second later than the peers do, as on a node that is overloaded."""
    parent = os.getppid()
    os.kill(parent, signal.SIGSTOP)
    subprocess.Popen(["sh", "-c", "sleep 1; kill -CONT %d" % parent], stdin=subprocess.DEVNULL,
                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    globals()[how]()


def sleeps():
    time.sleep(120)


def deadlock():
    import threading
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def no_gpu():
    import torch
    torch.zeros(1, device="cuda")


def no_nccl():
    import torch.distributed as dist
    dist.new_group([RANK], backend="nccl")


def init_nccl():
    import torch.distributed as dist
    dist.init_process_group("nccl")
    dist.barrier()


def unresolved():
    """The address of the store is not a name here, as where a pod's DNS does not work yet."""
    import datetime
    import torch.distributed as dist
    if BAD:
        os.environ["MASTER_ADDR"] = "job-master-0.nobody.invalid"
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5 if BAD else 60))
    dist.barrier()


def deepspeed_config():
    from deepspeed.runtime.config import DeepSpeedConfig
    DeepSpeedConfig({"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2})


# Stand-ins.
def cuda_oom():
    import torch
    text = library("libc10_cuda.so", "CUDA out of memory. Tried to allocate ") + "20.00 GiB. GPU 0" + library(
        "libc10_cuda.so", " has a total capacity of ") + "79.11 GiB of which 3.01 GiB" + library(
        "libc10_cuda.so", " is free. ")
    raise torch.cuda.OutOfMemoryError(text)


def cuda_error(text):
    import torch
    library("libcudart.so*", text)
    raise torch.AcceleratorError("CUDA error: %s\n%s.\n" % (text, library(
        "libc10_cuda.so", "For debugging consider passing CUDA_LAUNCH_BLOCKING=1")))


def nccl_timeout():
    what = ("[Rank %d] " % RANK + library("libtorch_cuda.so", "Watchdog caught collective operation timeout: ") +
            "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600041" +
            library("libtorch_cuda.so", " milliseconds before timing out."))
    thrown("c10::DistBackendError", "[PG ID 0 PG GUID 0(default_pg) Rank %d] " % RANK +
           library("libtorch_cuda.so", "Process group watchdog thread terminated with exception: ") + what)


def thrown(kind, text):
    """Ends as a C++ exception in a thread of PyTorch does."""
    native("thrown", """#include <exception>
#include <string>
#include <thread>
namespace c10 { struct DistBackendError : std::exception { std::string w; DistBackendError(const char* s) : w(s) {}
const char* what() const noexcept override { return w.c_str(); } }; }
extern "C" void f(const char* s) { std::string w = s; std::thread([w] { throw %s(w.c_str()); }).join(); }
""" % kind).f(text.encode())


def nccl_remote():
    import torch.distributed as dist
    raise dist.DistBackendError(
        library("libtorch_cuda.so", "NCCL error in: ") + "ProcessGroupNCCL.cpp:3699, " +
        library("libnccl.so*", "remote process exited or there was a network error") + ", NCCL version 2.30.7\n" +
        library("libtorch_cuda.so", "ncclRemoteError: A call failed possibly due to a network error or a remote "
                "process exiting prematurely.") + "\nLast error:\n" +
        library("libnccl.so*", "socketProgress: Connection closed by remote peer ") + "host-b<10.0.0.2>")


def nccl_system():
    import torch.distributed as dist
    raise dist.DistBackendError(
        library("libtorch_cuda.so", "NCCL error in: ") + "NCCLUtils.cpp:77, " +
        library("libnccl.so*", "unhandled system error (run with NCCL_DEBUG=INFO for details)") +
        ", NCCL version 2.30.7\n" +
        library("libtorch_cuda.so", "ncclSystemError: System call (e.g. socket, malloc) or external library call "
                "failed or device error. "))


# Faults of a whole job.
def nccl_job():
    """BAD's connection breaks; the others time out by their watchdogs: the stand-ins of both ends."""
    import torch.distributed as dist
    dist.barrier()
    if BAD:
        cuda_error("uncorrectable ECC error encountered")
    nccl_remote()


def nccl_hang_job():
    import torch.distributed as dist
    dist.barrier()
    if BAD:
        time.sleep(60)
    nccl_timeout()


def monitored_barrier():
    import datetime
    import torch.distributed as dist
    if BAD:
        time.sleep(60)
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=2))


def store_key():
    import datetime
    from torch.distributed import distributed_c10d
    store = distributed_c10d._get_default_store()
    store.set_timeout(datetime.timedelta(seconds=2))
    if BAD:
        time.sleep(60)
    store.get("checkpoint-path")


def ddp_mismatch():
    import torch
    from torch.nn.parallel import DistributedDataParallel
    model = torch.nn.Linear(4, 5 if BAD else 4)
    DistributedDataParallel(model)


def own_store():
    """The store is in rank 0, as in jobs without a launcher's; rank 0 is killed."""
    import datetime
    import torch.distributed as dist
    port = int(os.environ["MASTER_PORT"]) % 20000 + 30000
    store = dist.TCPStore("127.0.0.1", port, WORLD, RANK == 0, datetime.timedelta(seconds=TIMEOUT))
    store.add("up", 1)
    while store.add("up", 0) < WORLD:
        time.sleep(0.01)
    if RANK == 0:
        time.sleep(0.5)
        kill9()
    store.get("never")


def late_member():
    """BAD does not come to the first meeting."""
    import datetime
    import torch.distributed as dist
    if BAD:
        time.sleep(60)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
    dist.barrier()


def jax_job():
    import jax
    jax.distributed.initialize("127.0.0.1:%d" % (int(os.environ["MASTER_PORT"]) % 20000 + 30000), WORLD, RANK,
                               heartbeat_timeout_seconds=10)
    import jax.numpy as jnp
    print(jnp.ones(2).sum())
    time.sleep(1)
    if BAD and os.environ.get("JAX") == "kill":
        kill9()
    if BAD:
        user_exception()
    time.sleep(60)


def jax_shapes():
    import jax.numpy as jnp
    if BAD:
        time.sleep(0.3)
        return jnp.ones((2, 3)) @ jnp.ones((4, 5))
    import jax
    jax.distributed.initialize  # SIGTERM is caught
    time.sleep(60)


def paddle_job():
    import paddle
    print(paddle.ones([2]).sum().item(), flush=True)
    open(os.path.join(DIR, "ready.%d" % RANK), "w").close()
    while len(glob.glob(os.path.join(DIR, "ready.*"))) < WORLD:
        time.sleep(0.05)
    time.sleep(0.3)
    if BAD:
        how = os.environ.get("PADDLE", "raise")
        if how == "enforce":
            paddle.matmul(paddle.ones([2, 3]), paddle.ones([4, 5]))
        if how == "segv":
            segv()
        if how == "term":
            kill_term()
        user_exception()
    time.sleep(60)


JOBS = {"nccl_job", "nccl_hang_job", "monitored_barrier", "store_key", "ddp_mismatch"}  # after init_process_group
ALONE = {"own_store", "late_member", "init_nccl", "unresolved", "jax_job", "jax_shapes", "paddle_job"}  # instead of it


def main():
    name, _, argument = FAULT.partition(":")
    fault, arguments = globals()[name], [argument] * (argument != "")
    if os.environ.get("EARLY") and BAD:
        fault(*arguments)
    if name in ALONE:
        fault()
        return
    import datetime
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
    ones = torch.ones(1024)
    for step in range(10**9):
        if step == 3 and name in JOBS:
            fault()
        if step == 3 and BAD:
            fault(*arguments)
        dist.all_reduce(ones)
        ones /= WORLD
        if os.environ.get("STEP"):
            time.sleep(float(os.environ["STEP"]))


if __name__ == "__main__":
    if os.environ.get("RECORD"):
        from torch.distributed.elastic.multiprocessing.errors import record
        record(main)()
    else:
        main()
