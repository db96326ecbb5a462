# The probe of a node check: measures this node's devices and the network with the job's own PyTorch.
#
# It is run by the launcher (package netcheck/python). Commands come as JSON lines on standard input, answers go as JSON
# lines to file descriptor 4, because libraries print to the others. Python 3.8 and later, PyTorch 1.13 and later.
#
# This process imports PyTorch and never uses it. Each device gets a process that is forked from it: a device that
# hangs or crashes costs its own process only, and no device pays for another import. They live until one of them fails.
import ctypes
import json
import os
import select
import signal
import sys
import time

ANSWERS = 4
MAX_LINE = 1 << 16  # bytes of a command or an answer
GRACE = 1.0  # seconds for the other devices, after one has failed
COUNT_LIMIT = 60.0  # seconds to find out how many devices there are; drivers initialize all of them
PR_SET_PDEATHSIG = 1

# By kind of device: the module that teaches it to PyTorch, and the backend of its collectives.
KINDS = {
    "cuda": (None, "nccl"),
    "npu": ("torch_npu", "hccl"),
    "musa": ("torch_musa", "mccl"),
    "cpu": (None, "gloo"),
}


def answer(message):
    text = json.dumps(message)
    if len(text) >= MAX_LINE:
        text = json.dumps({"id": message.get("id", 0), "error": "the answer is too long"})
    data = (text + "\n").encode()
    while data:
        data = data[os.write(ANSWERS, data):]


def words(error):
    """The error in one line, with what it means in front where that is known."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (type(error).__name__ + ": " + (lines[0] if lines else ""))[:300]
    low = str(error).lower()
    for sign, meaning in MEANINGS:
        if sign in low:
            return meaning + " (" + text + ")"
    return text


MEANINGS = [
    ("out of memory", "the device has too little free memory"),
    ("uncorrectable ecc", "the device's memory has errors"),
    ("device-side assert", "the device computes wrongly"),
    ("illegal memory access", "the device computes wrongly"),
    ("unspecified launch failure", "the device computes wrongly"),
    ("system not yet initialized", "the fabric manager of the node's switches does not run"),
    ("driver version is insufficient", "the driver is too old for this PyTorch"),
    ("no kernel image", "this PyTorch was not built for the device"),
    ("connection refused", "the other node refused the connection"),
    ("connection reset", "the connection broke"),
    ("connection closed", "the connection broke"),
    ("remote process exited", "the other node's process ended"),
    ("no route to host", "there is no route to the other node"),
    ("network is unreachable", "there is no route to the other node"),
    ("unable to find address for", "the interface has no address"),
    ("unable to find interface", "there is no such interface"),
    ("no socket interface found", "there is no such interface"),
    ("unhandled system error", "the network failed under NCCL"),
    ("timed out", "no answer in time"),
    ("timeout", "no answer in time"),
]


# ---- what the process of one device does ----

class Device:
    """One device, in a process of its own. Index -1 is the CPU."""

    def __init__(self, torch, kind, index, count, note):
        self.torch, self.kind, self.index, self.count, self.note = torch, kind, index, count, note
        self.groups = 0
        if index < 0:
            torch.set_num_threads(1)  # comparable between nodes, whatever else runs there
            self.name = torch.device("cpu")
            return
        self.module = getattr(torch, kind)
        self.module.set_device(index)
        self.name = torch.device(kind, index)

    def synchronize(self):
        if self.index >= 0:
            self.module.synchronize()

    def run(self, command):
        if command["do"] == "compute":
            return self.compute(command.get("quick", False))
        return self.collective(command)

    def compute(self, quick):
        torch = self.torch
        self.note("allocating memory")
        size, kind, budget = (256, torch.float32, 0.2) if self.index < 0 else (8192, self.float_type(), 0.4)
        generator = torch.Generator().manual_seed(1)
        a = torch.randn(size, size, generator=generator).to(self.name, kind)
        b = torch.randn(size, size, generator=generator).to(self.name, kind)
        self.note("multiplying matrices")
        self.verify(size, kind)
        until(budget / 4, lambda: self.timed(lambda: torch.matmul(a, b), 1))  # clocks rise under load
        times = until(budget / 4 if quick else budget, lambda: self.timed(lambda: torch.matmul(a, b), 2))
        # Whatever else runs on a CPU makes some products slower; a slow CPU makes all of them slower.
        return {"matmul": 1000 * (min(times) if self.index < 0 else median(times))}

    def float_type(self):
        torch = self.torch
        try:
            if self.module.is_bf16_supported():
                return torch.bfloat16
        except Exception:
            pass
        return torch.float32

    def verify(self, size, kind):
        """All products of ones are the number of their terms, exactly."""
        ones = self.torch.ones(size, size, device=self.name, dtype=kind)
        product = self.torch.matmul(ones, ones)
        if not bool((product == size).all()):
            raise ArithmeticError("matrix products are wrong")

    def timed(self, work, times):
        """Seconds for each of some repetitions."""
        self.synchronize()
        begun = time.perf_counter()
        for _ in range(times):
            work()
        self.synchronize()
        return (time.perf_counter() - begun) / times

    def collective(self, command):
        import datetime

        dist = self.torch.distributed
        limit = max(1.0, command["limit"] - 1)
        timeout = datetime.timedelta(seconds=limit)
        self.note("connecting to the store")
        store = dist.TCPStore(command["host"], command["port"], is_master=False, timeout=timeout,
                              wait_for_workers=False)
        store = dist.PrefixStore(command["test"], store)
        self.note("waiting for the other nodes")
        sizes = agree(store, command["rank"], command["world"], self.count, self.index <= 0)
        backend, rank, world = place(sizes, command["rank"], self.index, self.backend())
        if rank < 0:
            return {"idle": True}
        debug = debug_file(backend)
        self.note("joining the group")
        dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world,
                                timeout=timeout)
        result = self.measure(dist, backend, world, command)  # one that fails ends this process, and the group with it
        self.note("leaving the group")
        dist.destroy_process_group()
        result["backend"], result["transport"] = backend, transport(debug)
        return result

    def backend(self):
        name = KINDS[self.kind][1]
        available = getattr(self.torch.distributed, "is_" + name + "_available", lambda: True)
        return name if self.index >= 0 and available() else "gloo"

    def measure(self, dist, backend, world, command):
        name = self.name if backend != "gloo" else self.torch.device("cpu")
        small, large, budget = (1 << 18, 1 << 23, 0.4) if backend == "gloo" else (1 << 20, 1 << 26, 0.3)
        if command.get("quick", False):
            budget /= 2
        latency = self.allreduce(dist, name, small, budget / 2)
        seconds = self.allreduce(dist, name, large, budget)
        return {"latency": 1000 * latency, "allreduce": 1000 * seconds, "bytes": large,
                "bus_mbps": large / seconds * 2 * (world - 1) / world / 1e6}

    def allreduce(self, dist, name, size, budget):
        """Seconds of one allreduce of size bytes. All ranks repeat it equally often."""
        torch = self.torch
        self.note("allreduce of %d KiB" % (size >> 10))
        data = torch.ones(size // 4, dtype=torch.float32, device=name)

        def once():
            dist.all_reduce(data, op=dist.ReduceOp.MAX)

        self.timed(once, 1)  # makes the connections
        slowest = torch.tensor([self.timed(once, 2)], dtype=torch.float32, device=name)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times = max(3, min(50, int(budget / max(float(slowest[0]), 1e-6))))
        seconds = median([self.timed(once, 1) for _ in range(times)])
        if not bool((data == 1).all()):
            raise ArithmeticError("allreduce returned wrong data")
        return seconds


def until(budget, measure):
    """Measurements for some seconds, at least three."""
    end = time.perf_counter() + budget
    times = []
    while len(times) < 3 or time.perf_counter() < end:
        times.append(measure())
    return times


def median(values):
    values = sorted(values)
    return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2


def agree(store, node, nodes, devices, speaks):
    """The devices of every node. Rank 0 collects them, so that each of many nodes asks once."""
    if speaks:
        store.set("devices/%d" % node, str(devices))
        if node == 0:
            store.set("devices", ",".join(store.get("devices/%d" % i).decode() for i in range(nodes)))
    return [int(n) for n in store.get("devices").decode().split(",")]


def place(sizes, node, index, backend):
    """The backend, and the rank and size of the group: one process for each device, or, where any node has none, one
    for each node. Rank -1: this process is not needed."""
    if min(sizes) > 0:
        return backend, sum(sizes[:node]) + index, sum(sizes)
    return "gloo", node if index <= 0 else -1, len(sizes)


def debug_file(backend):
    """Where NCCL says which network it takes: a file without a name. What the user has set stays."""
    if backend != "nccl" or "NCCL_DEBUG" in os.environ or not hasattr(os, "memfd_create"):
        return -1
    if "NCCL_DEBUG_FILE" not in os.environ:
        debug_file.fd = os.memfd_create("nccl")
        os.environ["NCCL_DEBUG_FILE"] = "/proc/self/fd/%d" % debug_file.fd
        os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,NET"
    os.environ["NCCL_DEBUG"] = "INFO"
    return debug_file.fd


debug_file.fd = -1


def transport(fd):
    if fd < 0:
        return ""
    text = os.pread(fd, 1 << 20, 0).decode("ascii", "replace")
    _, found, rest = text.rpartition("Using network ")
    return rest.split("\n")[0].strip()[:40] if found else ""


def device_main(torch, kind, index, count, commands, results):
    """Carries out commands until there are no more."""
    def say(message):
        os.write(results, (json.dumps(message) + "\n").encode())

    device = None
    for line in os.fdopen(commands):
        try:
            if device is None:
                say({"at": "waking up"})
                device = Device(torch, kind, index, count, lambda at: say({"at": at}))
            say({"ok": device.run(json.loads(line))})
        except BaseException as error:  # whatever it is, it is the answer
            say({"error": words(error)})
            return


# ---- the process that hands out the work ----

class Worker:
    """The process of one device, seen from outside."""

    def __init__(self, pid, index, commands, results):
        self.pid, self.index, self.commands, self.results = pid, index, commands, results
        self.buffer, self.at, self.result = b"", "", None

    def name(self):
        return "the CPU" if self.index < 0 else "GPU %d" % self.index

    def read(self):
        """Takes what the process says. It has ended when there is no more."""
        try:
            data = os.read(self.results, MAX_LINE)
        except OSError:
            data = b""
        if not data:
            died = self.death()
            self.result = self.result if self.result and "error" in self.result else {"error": died}
            return
        self.buffer += data
        while b"\n" in self.buffer:
            line, self.buffer = self.buffer.split(b"\n", 1)
            message = json.loads(line)
            self.at = message.get("at", self.at)
            if "at" not in message:
                self.result = message
        if len(self.buffer) > MAX_LINE:
            self.result = {"error": "the process of the device says too much"}

    def death(self):
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        how = "signal %d" % os.WTERMSIG(status) if os.WIFSIGNALED(status) else "status %d" % os.WEXITSTATUS(status)
        return "its process ended with %s while %s" % (how, self.at or "idle")

    def end(self):
        os.close(self.commands)
        os.close(self.results)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


class Probe:
    def __init__(self, torch, kind, devices):
        self.torch, self.kind, self.devices = torch, kind, devices
        self.workers = []
        self.job = None
        self.heard = b""

    def fork(self, index):
        command_read, command_write = os.pipe()
        result_read, result_write = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            os.close(command_read)
            os.close(result_write)
            return Worker(pid, index, command_write, result_read)
        try:
            die_with(parent)
            others = [fd for w in self.workers for fd in (w.commands, w.results)]
            for fd in [ANSWERS, 0, command_write, result_read] + others:
                os.close(fd)
            os.open(os.devnull, os.O_RDONLY)  # 0
            device_main(self.torch, self.kind, index, self.devices, command_read, result_write)
        finally:
            os._exit(0)

    def begin(self, command):
        if self.job:
            answer({"id": command["id"], "error": "busy"})
            return
        if not self.workers:
            for index in range(self.devices) if self.devices else [-1]:
                self.workers.append(self.fork(index))
        for w in self.workers:
            w.result, w.at = None, "starting"
            try:
                os.write(w.commands, (json.dumps(command) + "\n").encode())
            except OSError:
                pass  # it has ended, which read finds
        self.job = command
        self.deadline = time.monotonic() + command["limit"]
        self.failed = False

    def step(self):
        """Waits for something to happen, and acts on it. False: the launcher has gone."""
        fds = [0] + [w.results for w in self.workers if w.pid]
        wait = max(0.0, self.deadline - time.monotonic()) if self.job else None
        ready, _, _ = select.select(fds, [], [], wait)
        for w in self.workers:
            if w.results in ready:
                w.read()
                if w.pid == 0 and not self.job:
                    self.end_workers()  # one has died between two commands: begin anew
                    break
        if 0 in ready and not self.command():
            return False
        if self.job:
            self.judge()
        return True

    def command(self):
        text = os.read(0, MAX_LINE)
        if not text:
            return False
        lines = (self.heard + text).split(b"\n")
        self.heard = lines.pop()
        for line in lines:
            command = json.loads(line.decode())
            if command["do"] != "cancel":
                self.begin(command)
            elif self.job:
                self.finish({"error": "canceled"})
        return True

    def judge(self):
        failed = [w for w in self.workers if w.result and "error" in w.result]
        late = [w for w in self.workers if not w.result]
        if failed and not self.failed:  # the others may have something to say, or wait for this one for ever
            self.failed = True
            self.deadline = min(self.deadline, time.monotonic() + GRACE)
        if not late and not failed:
            self.finish({"ok": [w.result["ok"] for w in self.workers]})
        elif not late or time.monotonic() >= self.deadline:
            within = "" if failed else " within %.3g s" % self.job["limit"]
            texts = ["%s: %s" % (w.name(), w.result["error"]) for w in failed]
            texts += ["%s: no answer%s while %s" % (w.name(), within, w.at) for w in late]
            more = "" if len(texts) <= 4 else "; and %d more" % (len(texts) - 4)
            self.finish({"error": "; ".join(texts[:4]) + more})

    def finish(self, message):
        message["id"] = self.job["id"]
        self.job = None
        if "error" in message:
            self.end_workers()
        answer(message)

    def end_workers(self):
        for w in self.workers:
            w.end()
        self.workers = []

    def run(self):
        while self.step():
            pass
        self.end_workers()


def die_with(parent):
    """The kernel kills this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def count(torch, kind):
    """How many devices there are. Asked in a process of its own: a driver that was used does not survive a fork."""
    read, write = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with(parent)
            module = getattr(torch, kind)
            text = str(module.device_count() if module.is_available() else 0)
        except BaseException as error:
            text = words(error)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    text = "asking the driver takes more than %d s" % COUNT_LIMIT
    if select.select([read], [], [], COUNT_LIMIT)[0]:
        text = os.read(read, 4096).decode() or "the process that asks the driver crashes"
    os.close(read)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return (int(text), "") if text.isdigit() else (0, text)


def load(kind):
    """Imports PyTorch and says how that went. None if it failed."""
    begun = time.monotonic()
    try:
        import torch
        import torch.distributed
        if KINDS[kind][0]:
            __import__(KINDS[kind][0])
    except ImportError as error:
        missing = getattr(error, "name", None) == "torch"
        answer({"missing" if missing else "broken": words(error)})
        return None
    except BaseException as error:
        answer({"broken": words(error)})
        return None
    if not torch.distributed.is_available():
        answer({"broken": "this PyTorch was built without torch.distributed"})
        return None
    devices, why = count(torch, kind) if kind != "cpu" else (0, "")
    answer({"ready": str(torch.__version__), "libraries": libraries(torch), "devices": devices, "why": why,
            "seconds": time.monotonic() - begun})
    return Probe(torch, kind, devices)


def libraries(torch):
    version = getattr(torch, "version", None)
    names = [(n, getattr(version, n, None)) for n in ("cuda", "hip")]
    return ", ".join("%s %s" % (n.upper(), v) for n, v in names if v)


def main():
    os.set_inheritable(ANSWERS, False)
    os.set_inheritable(0, False)
    import warnings

    warnings.simplefilter("ignore")
    probe = load(sys.argv[1])
    if probe:
        probe.run()


main()
