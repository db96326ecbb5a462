"""Everything that touches a GPU, on a machine with an NVIDIA GPU: what its driver says, checks, failures, checkpoints,
hangs, timelines, restarts. The programs are prebuilt, Python is the standard library, PyTorch is the jobs'.

    python3 e2e.py [--bin=DIR] [--out=DIR] [--jobs=N] [--rehearse] [NAME...]

NAME...     only checks whose names begin so
--bin       where dlrover-run, dlroverctl and gpucheck are (bin/ of the repository)
--out       where logs and figures.json go (a temporary directory)
--rehearse  without a GPU: what needs one is left out, and the rest computes on the CPU

The exit status is 0 if all have passed, 1 if one has failed, and 2 if there is no GPU.
"""
import argparse
import concurrent.futures
import csv
import glob
import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
JOBS = os.path.join(HERE, "jobs.py")
CHECKS = []
FIGURES = {}
OPTIONS = None


class Skipped(Exception):
    pass


def check(alone=False, limit=100, gpu=True):
    """A check is a function of a Place. Those that measure, or need the device for themselves, run alone."""
    def add(f):
        CHECKS.append((f.__name__, f, alone, limit, gpu))
        return f
    return add


def figure(name, value):
    FIGURES[name] = value
    print("  figure: %s: %s" % (name, value if isinstance(value, str) else "%.4g" % value), flush=True)


class Ended:
    """A program that has ended."""

    def __init__(self, rc, out, err, seconds):
        self.rc, self.out, self.err, self.seconds = rc, out, err, seconds

    def said(self):
        """What a job has said."""
        return [json.loads(l) for l in self.out.splitlines() if l.startswith("{")]

    def word(self, key):
        for line in self.said():
            if key in line:
                return line[key]
        raise AssertionError("%r was not said; status %s, output %r" % (key, self.rc, (self.out + self.err)[-1500:]))

    def logged(self, part):
        """Messages of the launcher with these words."""
        found = []
        for line in self.err.splitlines():
            try:
                message = json.loads(line)["msg"]
            except (ValueError, KeyError, TypeError):
                continue
            if part in message:
                found.append(message)
        return found

    def want(self, rc):
        if self.rc != rc:
            raise AssertionError("status %s, not %s: %s" % (self.rc, rc, (self.out + self.err)[-3000:]))
        return self


class Program:
    """A program that runs, with everything that it starts in a process group of its own."""

    def __init__(self, place, args, env, limit):
        place.count += 1
        self.name = "%s.%d" % (place.name, place.count)
        self.begun, self.limit = time.monotonic(), limit
        self.log = os.path.join(OPTIONS.out, self.name)
        self.files = [open(self.log + end, "w+") for end in (".out", ".err")]
        full = dict(os.environ, PYTHONUNBUFFERED="1", PYTHON_EXEC=sys.executable, HOME=place.dir, **env)
        full["PATH"] = OPTIONS.bin + ":" + full["PATH"]
        command = ["%s=%s" % i for i in sorted(env.items())] + [str(a) for a in args]
        self.files[1].write("# %s\n" % " ".join(command))
        self.files[1].flush()
        self.process = subprocess.Popen([str(a) for a in args], stdin=subprocess.PIPE, stdout=self.files[0],
                                        stderr=self.files[1], env=full, cwd=place.dir, start_new_session=True)
        place.programs.append(self)

    def read(self):
        out = []
        for end in (".out", ".err"):
            with open(self.log + end, errors="replace") as f:
                out.append(f.read())
        return Ended(self.process.poll(), out[0], out[1], time.monotonic() - self.begun)

    def until(self, words, limit):
        """Waits until it has printed something that matches."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            now = self.read()
            found = re.search(words, now.out + now.err)
            if found:
                return found
            if now.rc is not None:
                raise AssertionError("status %s before %r: %s" % (now.rc, words, (now.out + now.err)[-3000:]))
            time.sleep(0.05)
        raise AssertionError("no %r within %s s: %s" % (words, limit, (now.out + now.err)[-3000:]))

    def wait(self):
        try:
            self.process.wait(max(0.1, self.limit - (time.monotonic() - self.begun)))
        except subprocess.TimeoutExpired:
            self.kill()
            last = self.read()
            raise AssertionError("it has not ended in %s s: %s" % (self.limit, (last.out + last.err)[-3000:]))
        return self.read()

    def stop(self, seconds=30):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.read()

    def kill(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


class Place:
    """What a check works with: a directory, programs that end with it."""

    def __init__(self, name, limit):
        self.name, self.limit, self.count, self.programs = name, limit, 0, []
        self.dir = tempfile.mkdtemp(prefix="e2e-gpu-")

    def start(self, *args, limit=None, **env):
        return Program(self, args, env, limit or self.limit)

    def run(self, *args, limit=None, **env):
        return self.start(*args, limit=limit, **env).wait()

    def job(self, options, *job, **env):
        return self.start("dlrover-run", "--standalone", "--log-format=json", *options, JOBS, *job, **env)

    def close(self):
        for p in self.programs:
            if p.process.poll() is None:
                p.stop(10)
        shutil.rmtree(self.dir, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------------------
# gpucheck
# ---------------------------------------------------------------------------------------------------------------------

SMI = ("index name uuid pci.bus_id memory.total memory.used driver_version ecc.mode.current "
       "ecc.errors.uncorrected.volatile.total ecc.errors.corrected.volatile.total pcie.link.gen.current "
       "pcie.link.gen.max pcie.link.width.current pcie.link.width.max mig.mode.current remapped_rows.uncorrectable "
       "remapped_rows.pending remapped_rows.failure").split()


def smi(place):
    """What nvidia-smi says of every GPU."""
    text = place.run("nvidia-smi", "--query-gpu=" + ",".join(SMI), "--format=csv,noheader,nounits").want(0).out
    return [dict(zip(SMI, (v.strip() for v in row))) for row in csv.reader(text.splitlines())]


def report(ended):
    return json.loads(ended.out.splitlines()[-1])


@check(alone=True)
def gpucheck_says_what_nvidia_smi_says(p):
    theirs = smi(p)
    p.run("nvidia-smi", "-q")
    for level in ("inventory", "links", "copy"):
        for words in ([], ["--json"]):
            ended = p.run("gpucheck", "--level=" + level, *words, limit=60).want(0)
            figure("gpucheck --level=%s %s, s" % (level, " ".join(words)), ended.seconds)
        r = report(ended)
        assert r["state"] == "ok", r
        assert len(r["devices"]) == len(theirs), r
        for ours, smi_ in zip(r["devices"], theirs):
            same_device(ours, smi_, level)
    assert theirs[0]["driver_version"] in r["driver"], r["driver"]
    figure("driver", r["driver"])
    figure("GPU", theirs[0]["name"])
    for f in r.get("findings", []):
        figure("finding", json.dumps(f))


def same_device(ours, theirs, level):
    assert ours["index"] == int(theirs["index"])
    assert ours["name"] == theirs["name"] and ours["uuid"] == theirs["uuid"], (ours, theirs)
    assert theirs["pci.bus_id"].lower().endswith(ours["pci"]), (ours["pci"], theirs["pci.bus_id"])
    memory = ours["memory"]
    assert abs(memory["total"] / 2**20 - float(theirs["memory.total"])) <= 1, (memory, theirs)
    assert memory["used"] / 2**20 < float(theirs["memory.used"]) + 2048, (memory, theirs)
    assert bool(ours.get("mode", {}).get("mig")) == (theirs["mig.mode.current"] == "Enabled"), (ours, theirs)
    if level == "inventory":
        return
    if theirs["ecc.mode.current"] == "Enabled":
        ecc = ours["ecc"]
        assert ecc["enabled"], ecc
        for key, field in ("uncorrected", "ecc.errors.uncorrected.volatile.total"), (
                "corrected", "ecc.errors.corrected.volatile.total"):
            assert ecc[key] == int(theirs[field]), (ecc, theirs)
    if theirs["remapped_rows.pending"] in ("Yes", "No", "0", "1"):
        remap = ours["remap"]
        assert remap["uncorrectable"] == int(theirs["remapped_rows.uncorrectable"]), (remap, theirs)
        assert remap["pending"] == (theirs["remapped_rows.pending"] in ("Yes", "1")), (remap, theirs)
        assert remap["failed"] == (theirs["remapped_rows.failure"] in ("Yes", "1")), (remap, theirs)
    pcie = ours["pcie"]
    for key, field in ("max_gen", "pcie.link.gen.max"), ("width", "pcie.link.width.current"), (
            "max_width", "pcie.link.width.max"):
        if theirs[field].isdigit():
            assert pcie[key] == int(theirs[field]), (key, pcie, theirs)


@check(alone=True)
def gpucheck_copies(p):
    r = report(p.run("gpucheck", "--json", "--level=copy").want(0))
    for pair in r["pairs"]:
        figure("copy %s, MB/s" % json.dumps(pair), float(pair.get("mbps", 0)))
        assert pair.get("mbps", 0) > 0, pair
    if len(r["devices"]) == 1:
        ended = p.run("gpucheck", "--pairs", "0:1").want(2)
        figure("one GPU, --pairs 0:1", ended.err.splitlines()[-1])
        for words in (["--pairs=ring"], ["--pairs", "0:0"], ["--min-bandwidth=10000", "--min-channels=2"],
                      ["--level=copy", "--min-bandwidth=10000", "--min-channels=1"]):
            ended = p.run("gpucheck", *words)
            said = ended.out + ended.err.split("\n", 1)[1]
            figure("one GPU, %s" % " ".join(words), "status %s: %s" % (ended.rc, said))
    for hidden in ("", "GPU-00000000-0000-0000-0000-000000000000"):
        ended = p.run("gpucheck", "--level=copy", CUDA_VISIBLE_DEVICES=hidden)
        figure("copy under CUDA_VISIBLE_DEVICES=%r" % hidden, "status %s: %s" % (ended.rc, ended.out))


@check(alone=True)
def gpucheck_finds_memory_in_use(p):
    total = float(smi(p)[0]["memory.total"]) / 1024
    for share, rc in (0.2, 0), (0.5, 1):
        holder = p.start(sys.executable, JOBS, "hold", "%.1f" % (share * total))
        pid = holder.until(r'"pid": (\d+)', 60).group(1)
        ended = p.run("gpucheck", "--json", "--level=copy")
        ended.want(rc)
        if rc == 1:
            reason = report(ended)["reason"]
            figure("memory in use", reason)
            assert "has 5" in reason and "python" in reason and pid in reason, reason
            job = p.job(["--switchbox-check"], "count").wait()
            assert job.rc != 0 and job.logged("memory in use"), job.err
        holder.process.stdin.close()
        holder.wait().want(0)


@check(alone=True)
def xids_are_told(p):
    """What the driver tells while a program writes to nowhere, if it does so during a copy."""
    found = []
    program = p.start(sys.executable, JOBS, "fail", "illegal")
    while program.process.poll() is None:
        r = report(p.run("gpucheck", "--json", "--level=copy"))
        found += [f["text"] for f in r.get("findings", []) if f["severity"] != "info"]
        assert r["state"] == "ok", r
    figure("gpucheck beside an illegal access", json.dumps(found))


# ---------------------------------------------------------------------------------------------------------------------
# Checks of a node
# ---------------------------------------------------------------------------------------------------------------------


@check(alone=True, limit=150, gpu=False)
def node_checks(p):
    for options in (["--switchbox-check", "--check-only"], ["--network-check", "--check-only"],
                    ["--network-check", "--switchbox-check", "--check-only"], ["--check-only", "--check-level=host"]):
        ended = p.run("dlrover-run", "--standalone", "--log-format=json", *options).want(0)
        figure("dlrover-run %s, s" % " ".join(options), ended.seconds)
        print("\n".join("    " + l for l in ended.out.splitlines()))
    ended = p.job(["--network-check", "--switchbox-check"], "start", "nccl").wait().want(0)
    assert ended.word("loss") > 0
    figure("job with --network-check --switchbox-check, s", ended.seconds)


@check(limit=150, gpu=False)
def two_nodes_check_each_other(p):
    """Two launchers on one GPU, which NCCL takes for two hosts."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    nodes = [p.start("dlrover-run", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:%d" % port,
                     "--log-format=json", "--network-check", "--check-only", NCCL_HOSTID="host-%d" % i,
                     NCCL_SOCKET_IFNAME="lo") for i in range(2)]
    for n in nodes:
        ended = n.wait().want(0)
        print("\n".join("    " + l for l in ended.out.splitlines()))
    figure("two nodes, --network-check, s", ended.seconds)


# ---------------------------------------------------------------------------------------------------------------------
# Starting
# ---------------------------------------------------------------------------------------------------------------------


@check(limit=100)
def devices_are_counted_as_pytorch_counts_them(p):
    uuid = smi(p)[0]["uuid"]
    lists = [None, "", "0", "-1", "1", "0,1", "1,0", "0,0", "abc", " 0", "0abc", uuid, uuid[:12], uuid + "," + uuid,
             "GPU-00000000-0000-0000-0000-000000000000", "NoDevFiles"]

    def both(visible):
        env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        pytorch = p.start(sys.executable, JOBS, "count", **env).wait().word("count")
        ended = p.run("dlrover-run", "--standalone", "--nproc-per-node=gpu", "--dry-run", JOBS, "count", **env)
        ours = json.loads(ended.out)["workers"] if ended.rc == 0 else 0
        return visible, pytorch, len(ours) if isinstance(ours, list) else ours, ended.err.splitlines()[-1]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(both, lists))
    for row in rows:
        print("    CUDA_VISIBLE_DEVICES=%r: PyTorch %s, ours %s: %s" % row)
    # Which GPU has a UUID is known to the driver only, whom the launcher does not ask.
    wrong = [r for r in rows if r[1] != r[2] and not str(r[0]).startswith("GPU-0000")]
    assert not wrong, wrong
    ended = p.job(["--nproc-per-node=auto"], "start", "nccl").wait().want(0)
    assert ended.word("on") == "cuda:0", ended.out


@check(alone=True, limit=200, gpu=False)
def starts_beside_torchrun(p):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ours = ["dlrover-run", "--standalone", "--log-format=json"]
    for workers, backend in ("1", "nccl"), ("2", "gloo"):
        for name, launcher in ("first, not counted", ours), ("torchrun", torchrun), ("dlrover-run", ours):
            times = []
            for _ in range(1 if "," in name else 2):
                begun = time.time()
                ended = p.run(*launcher, "--nproc_per_node=" + workers, JOBS, "start", backend).want(0)
                times.append([ended.word(k) - begun for k in ("began", "imported", "device", "group", "step")]
                             + [ended.seconds])
            best = min(times, key=lambda t: t[-2])
            for what, seconds in zip(("script", "import torch", "device", "process group", "first step", "end"), best):
                if "," not in name:
                    figure("%s, %s %s: %s after, s" % (name, workers, backend, what), seconds)
    figure("PyTorch", ended.word("torch"))


@check(limit=100)
def workers_on_one_gpu(p):
    for options, backend in ((["--nproc-per-node=2"], "nccl-shared"), (["--nproc-per-node=gpu", "--virtual-local-rank"],
                             "nccl"), (["--nproc-per-node=gpu", "--numa-affinity"], "nccl"),
                             (["--nproc-per-node=gpu", "--numa-binding=node"], "nccl")):
        ended = p.job(options, "start", backend).wait().want(0)
        assert ended.word("on") == "cuda:0"
        print("    %s: %s" % (options, [json.loads(l).get("msg") for l in ended.err.splitlines()
                                        if '"WARN"' in l or '"ERROR"' in l]))


@check()
def a_device_in_use_is_told(p):
    holder = p.start(sys.executable, JOBS, "hold", "1")
    pid = holder.until(r'"pid": (\d+)', 60).group(1)
    ended = p.job(["--nproc-per-node=gpu"], "start", "nccl").wait().want(0)
    told = ended.logged("in use by another program")
    assert told and "pid %s " % pid in told[0] or told and "more" in told[0], ended.err
    figure("in use", told[0])
    holder.process.stdin.close()


# ---------------------------------------------------------------------------------------------------------------------
# Failures
# ---------------------------------------------------------------------------------------------------------------------


def failed(p, options, *job, **env):
    """The verdict on a job that fails, and its event."""
    p.count += 1
    events = os.path.join(p.dir, "events%d" % p.count)
    ended = p.job([*options, "--exit-code-policy=reason", "--event-log=" + events], *job, **env).wait()
    assert ended.rc not in (0, None), ended.out
    kept = os.path.join(OPTIONS.out, "%s.%s.events" % (p.name, "-".join(map(str, job)).replace("/", "_")[:60]))
    shutil.copy(events, kept)
    with open(events) as f:
        classes = re.findall(r'"(?:class|fault)":\s*"([^"]+)"', f.read())
    verdict = "".join(re.findall(r"^dlrover-run: job .*", ended.err, re.M))
    print("    %s -> status %s, %s: %s" % (" ".join(map(str, job)), ended.rc, sorted(set(classes)), verdict))
    return ended, verdict, classes


@check(limit=150)
def failures_of_one_worker(p):
    def one(row):
        how, workers, want, options, words = row
        ended, verdict, classes = failed(p, ["--nproc-per-node=%d" % workers, *options], "fail", how, **(
            {"CUDA_VISIBLE_DEVICES": ""} if how == "hidden" else {}))
        return how, want in classes and re.search(words, verdict), classes, verdict

    stop = "--rule=exception %s -> stop-job"
    rows = [
        ("oom", 1, "oom-device", [], "CUDA out of memory"),
        ("oom-at-once", 1, "oom-device", ["--max-restarts=3", stop % "torch.OutOfMemoryError"], "used 0 of 3"),
        ("oom-at-once", 1, "oom-device", ["--max-restarts=3", stop % "torch.cuda.OutOfMemoryError"], "used 0 of 3"),
        ("assert", 1, "device-error", [], "device-side assert triggered"),
        ("illegal", 1, "device-error", [], "illegal memory access"),
        ("illegal", 1, "device-error", ["--tee=3"], "illegal memory access"),
        ("illegal-in-training", 1, "device-error", [], "illegal memory access"),
        ("duplicate", 2, "nccl-error", [], "Duplicate GPU detected"),
        ("no-device", 1, "device-error", [], "invalid device ordinal"),
        ("hidden", 1, "device-error", [], "No CUDA GPUs are available"),
    ]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(one, rows))
    wrong = [r for r in rows if not r[1]]
    assert not wrong, wrong


@check(limit=150, gpu=False)
def failures_beside_a_peer(p):
    for backend in "nccl-shared", "gloo":
        for how, words in ("kill", r"rank 1 .*SIGKILL"), ("raise", r"rank 1 .*batch 17 is bad"), (
                # NCCL's watchdog may abort the worker before Python hears of the error: its output alone tells it then
                "illegal", r"rank 1 .*illegal memory access|illegal memory access.*rank 1 .*SIGABRT"), (
                    "timeout", r"timed? ?out"):
            if how == "illegal" and not OPTIONS.gpu:
                continue
            ended, verdict, classes = failed(p, ["--nproc-per-node=2", "--shutdown-timeout=5"], "peer", backend, how)
            figure("%s, %s: end after, s" % (backend, how), ended.seconds)
            assert re.search(words, ended.err, re.S), verdict
            if how == "timeout":
                told = ended.logged("before the stop")
                assert told and "load_batch" in told[0], ended.err


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------


@check(limit=100, gpu=False)
def checkpoints_are_the_same_to_the_last_bit(p):
    ended = p.job(["--max-restarts=1", "--ckpt-shm-dir=/dev/shm"], "ckpt", os.path.join(p.dir, "ckpt")).wait().want(0)
    figure("tensors compared", ended.word("equal"))
    assert ended.word("equal") >= 40
    assert '"from":"memory"' in ended.err, ended.err
    if OPTIONS.gpu:
        assert "cannot be registered" not in ended.err, ended.err


@check(limit=100, gpu=False)
def shards_come_back_from_memory(p):
    """Of FSDP on devices."""
    ended = p.job(["--nproc-per-node=2", "--max-restarts=1"], "fsdp", os.path.join(p.dir, "ckpt"),
                  os.path.join(p.dir, "mark")).wait().want(0)
    assert ended.word("losses") and '"from":"memory"' in ended.err, ended.err


@check(limit=200)
def the_trainer_of_hugging_face(p):
    """The client's own tests, on the device."""
    client = os.path.join(HERE, "../../../../../checkpointd/python")
    ended = p.run("sh", "-c", 'cd "$0" && exec "$1" -m unittest -v tests.test_torch2_hf', client, sys.executable,
                  CUDA_VISIBLE_DEVICES="0").want(0)
    if "SKIPPED" in ended.err:
        raise Skipped(ended.err.splitlines()[-1])


@check(alone=True, limit=170, gpu=False)
def rates_of_checkpoints(p):
    free = os.statvfs("/dev/shm")
    room = free.f_bavail * free.f_frsize / 2**30
    gib = min(float(os.environ.get("CKPT_GIB", "6")), room / 5)
    figure("/dev/shm has, GiB", room)
    plain = tempfile.mkdtemp(prefix="e2e-gpu-", dir="/dev/shm")
    try:
        ended = p.job(["--max-restarts=1"], "rates", os.path.join(p.dir, "ckpt"), plain, gib).wait().want(0)
    finally:
        shutil.rmtree(plain)
    for line in ended.said():
        for key, value in line.items():
            figure("checkpoint: " + key, json.dumps(value) if isinstance(value, list) else value)
    if OPTIONS.gpu:
        assert "cannot be registered" not in ended.err, ended.err


# ---------------------------------------------------------------------------------------------------------------------
# Hangs
# ---------------------------------------------------------------------------------------------------------------------


def hang(p, case, backend, words, options=("--hang=auto",), within=60, wait="synchronize", certain=False, **env):
    mark = os.path.join(p.dir, "mark")
    env = {"XPU_TIMER_TIMELINE_PATH": os.path.join(p.dir, "evidence"), **env}
    job = p.job(["--nproc-per-node=2", "--shutdown-timeout=3", *options], "hang", case, backend, mark, wait, **env)
    try:
        found = job.until(r'"msg":"(hang: [^"]*)"', within)
        told = time.time()
        while within <= 60 and time.time() < told + 25 and not glob.glob(
                os.path.join(p.dir, "evidence", "hang-*", "hang_report.txt")):
            time.sleep(0.2)  # it is written when it counts as a hang
    finally:
        files = glob.glob(os.path.join(p.dir, "evidence", "**", "*"), recursive=True)
        for f in files:
            if os.path.isfile(f):
                to = os.path.join(OPTIONS.out, p.name + "-evidence")
                os.makedirs(to, exist_ok=True)
                shutil.copy(f, to)
    began = float(open(mark).read())
    figure("%s over %s: told after, s" % (case, backend), told - began)
    print("    " + found.group(1))
    assert not certain or "(uncertain" not in found.group(1), found.group(1)
    assert re.search(words, found.group(1)), found.group(1)
    return job, files


@check(limit=100, gpu=False)
def hang_in_a_kernel(p):
    job, files = hang(p, "wait_for_kernel", "gloo", r"rank 1 .*(synchronize|occupy)", XPU_TIMER_HANG_TIMEOUT="10")
    begun = time.time()
    job.stop()
    figure("a worker in an endless kernel stops after, s", time.time() - begun)


@check(limit=100, gpu=False)
def hang_in_a_copy(p):
    hang(p, "copy_result", "gloo", r"rank 1 .*(copy_result|occupy)", XPU_TIMER_HANG_TIMEOUT="10")


@check(limit=100, gpu=False)
def hang_in_an_event(p):
    hang(p, "wait_for_event", "nccl-shared", r"rank 1 .*(wait_for_event|occupy)", certain=True,
         XPU_TIMER_HANG_TIMEOUT="10")


@check(limit=100, gpu=False)
def hang_beside_nccl(p):
    """Rank 1 does not come to the collective of NCCL in which the others are."""
    job, files = hang(p, "load_batch", "nccl-shared", r"rank 1 .*load_batch", certain=True,
                      XPU_TIMER_HANG_TIMEOUT="10")
    names = {os.path.basename(f) for f in files}
    for name in "py_stack.svg", "cpp_stack.svg", "hang_report.txt":
        assert name in names, names


@check(limit=100, gpu=False)
def hang_beside_nccl_in_item(p):
    """The others wait in .item(), of which no stack tells."""
    hang(p, "load_batch", "nccl-shared", r"rank 1 .*load_batch", wait="item", certain=True,
         XPU_TIMER_HANG_TIMEOUT="10")


@check(limit=100)
def hang_of_a_kernel_before_nccl(p):
    hang(p, "late_kernel", "nccl-shared", r"all_reduce|device", XPU_TIMER_HANG_TIMEOUT="10")


@check(limit=100, gpu=False)
def hang_in_another_collective(p):
    hang(p, "another_collective", "gloo", r"another collective", XPU_TIMER_HANG_TIMEOUT="10")


@check(limit=150)
def hang_beside_nccl_from_outside(p):
    hang(p, "load_batch", "nccl-shared", r"rank 1 .*load_batch", ["--hang=outside"], 140)


@check(limit=120, gpu=False)
def hang_is_restarted(p):
    mark = os.path.join(p.dir, "mark")
    options = ["--nproc-per-node=2", "--hang-action=restart", "--max-restarts=1"]
    ended = p.job(options, "hang", "wait_for_kernel", "nccl-shared", mark, XPU_TIMER_HANG_TIMEOUT="10",
                  XPU_TIMER_TIMELINE_PATH=os.path.join(p.dir, "e")).wait().want(0)
    figure("a hang in a kernel: goes on after, s", ended.word("again") - float(open(mark).read()))


@check(alone=True, limit=120, gpu=False)
def stacks_and_timelines(p):
    """Of all jobs on the machine, so there must not be others."""
    names = os.path.join(p.dir, "names")
    os.mkdir(names)
    p.run("dlroverctl", "install-names", names).want(0)
    job = p.job(["--nproc-per-node=2", "--hang=auto"], "train", "nccl-shared", 100000, "0.05")
    job.until(r'"trains"', 60)
    to = os.path.join(p.dir, "dump")
    os.mkdir(to)
    for words in (["--gdb", "--pyspy"], ["--timeline=5"], ["--timeline=2"]):
        ended = p.run(os.path.join(names, "xpu_timer_dump_driver"), *words, "--dump-path=" + to).want(0)
        figure("xpu_timer_dump_driver %s, s" % " ".join(words), ended.seconds)
        print("    " + ended.out.replace("\n", "\n    "))
    traces = sorted(glob.glob(os.path.join(to, "*.trace.json")))
    assert len(traces) == 2, os.listdir(to)
    for path in traces:
        with open(path) as f:
            events = json.load(f)["traceEvents"]
        kinds = {}
        for e in events:
            kinds[e.get("cat", "-")] = kinds.get(e.get("cat", "-"), 0) + 1
        figure("timeline %s" % os.path.basename(path), "%d bytes, %s" % (os.path.getsize(path), kinds))
        if OPTIONS.gpu:
            kernels = {e["name"] for e in events if e.get("cat") == "kernel"}
            print("    kernels: %s" % [k[:60] for k in sorted(kernels)][:12])
            assert any("nccl" in k.lower() for k in kernels), kernels
            assert any("gemm" in k.lower() or "cutlass" in k.lower() or "nvjet" in k.lower() for k in kernels), kernels
    shutil.copy(traces[0], OPTIONS.out)
    ended = p.run(os.path.join(names, "xpu_timer_stacktrace_viewer"), "--path", to).want(0)
    print("    viewer: " + ended.out.replace("\n", "\n    "))
    for name in "py_stack.svg", "cpp_stack.svg":
        shutil.copy(os.path.join(to, name), os.path.join(OPTIONS.out, "healthy-" + name))
    for f in glob.glob(os.path.join(to, "*.stacktrace")):
        shutil.copy(f, OPTIONS.out)
    job.stop()


@check(alone=True, limit=150, gpu=False)
def profiles_a_rank(p):
    """dlroverctl profile and flight of a job on the device: kernels in the trace, NCCL's own recorder."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        addr = "127.0.0.1:%d" % s.getsockname()[1]
    token = {"DLROVER_TOKEN": "a-token-of-the-gpu-tests-0123456789"}
    job = p.start("dlrover-run", "--nnodes=1", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=" + addr,
                  "--rdzv-id=looked", "--log-format=json", "--hang=auto", JOBS, "train", "nccl", 100000, "0.02",
                  **token)
    job.until(r'"trains"', 90)
    time.sleep(3)
    ctl = dict(token, DLROVER_MASTER_ADDR=addr)
    ended = p.run("dlroverctl", "profile", "looked", "0", "--seconds=3", "--path=" + p.dir, **ctl)
    print("    " + (ended.out + ended.err).replace("\n", "\n    "))
    figure("dlroverctl profile --seconds=3, s", ended.seconds)
    old = re.search(r"a profile needs PyTorch \S+ or newer, and this is \S+", ended.err)
    if old:
        figure("profile", old.group(0))
    else:
        path = ended.want(0).out.splitlines()[0].strip()
        shutil.copy(path, OPTIONS.out)
        with gzip.open(path) as f:
            trace = json.load(f)
        kinds = {}
        for e in trace["traceEvents"]:
            kinds[e.get("cat", "-")] = kinds.get(e.get("cat", "-"), 0) + 1
        figure("profile of a rank", "%d bytes, %s" % (os.path.getsize(path), kinds))
        figure("its wait counters", json.dumps(sorted(trace.get("wait_counters", {}))))
        assert kinds.get("python_function"), kinds
        assert kinds.get("cpu_op"), kinds
        if OPTIONS.gpu:
            kernels = {e["name"] for e in trace["traceEvents"] if e.get("cat") == "kernel"}
            print("    kernels: %s" % [k[:60] for k in sorted(kernels)][:12])
            assert kernels, kinds
    for words in ([], ["--json"]):
        ended = p.run("dlroverctl", "flight", "looked", *words, **ctl).want(0)
        print("    " + ended.out[:3000].replace("\n", "\n    "))
    found = json.loads(ended.out)
    collectives = json.dumps(found["collectives"])
    figure("flight", "%s of %s ranks answered: %s" % (found["answered"], found["ranks"], collectives))
    if OPTIONS.gpu:
        assert found["answered"] == found["ranks"] == 1, found
        assert found["collectives"], found
    before = job.read().out.count("\n")
    assert job.process.poll() is None, "the job has ended while it was looked at: " + job.read().err[-3000:]
    figure("the job goes on; lines it has said", before)
    job.stop()


@check(limit=100, gpu=False)
def other_names(p):
    names = os.path.join(p.dir, "names")
    os.mkdir(names)
    p.run("dlroverctl", "install-names", names).want(0)
    for args in (["torchrun", "--standalone", "--nproc-per-node=gpu" if OPTIONS.gpu else "--nproc-per-node=1"],
                 ["xpu_timer_launch", sys.executable]):
        ended = p.run(os.path.join(names, args[0]), *args[1:], JOBS, "start", "nccl").want(0)
        assert ended.word("loss") > 0, ended.out


@check(limit=120, gpu=False)
def metrics_while_it_trains(p):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        addr = "127.0.0.1:%d" % s.getsockname()[1]
    job = p.job(["--nproc-per-node=2", "--hang=auto", "--metrics-addr=" + addr], "train", "nccl-shared", 100000)
    job.until(r'"trains"', 60)
    time.sleep(6)
    text = urllib.request.urlopen("http://%s/metrics" % addr).read().decode()
    with open(os.path.join(OPTIONS.out, "metrics.txt"), "w") as f:
        f.write(text)
    steps = [float(v) for v in re.findall(r"^dlrover_hang_optimizer_steps\S* (\S+)", text, re.M)]
    assert len(steps) == 2 and min(steps) > 5, text
    collectives = [float(v) for v in re.findall(r"^dlrover_hang_collective_seq\S* (\S+)", text, re.M)]
    assert collectives and max(collectives) > 5, text
    job.stop()


# ---------------------------------------------------------------------------------------------------------------------
# Restarts
# ---------------------------------------------------------------------------------------------------------------------


@check(alone=True, limit=170, gpu=False)
def restarts(p):
    """From the kill of a worker to the next step."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ours = ["dlrover-run", "--standalone", "--log-format=json"]
    for name, launcher in (("torchrun", torchrun), ("dlrover-run", ours), ("dlrover-run --warm", [*ours, "--warm"]),
                           ("dlrover-run --warm --warm-mode=standby", [*ours, "--warm", "--warm-mode=standby"])):
        mark = os.path.join(p.dir, name.replace(" ", ""))
        # With the variable torchrun's next workers do not find the addresses of those before.
        job = p.start(*launcher, "--nproc_per_node=2", "--max_restarts=1", JOBS, "crash", "gloo", mark, limit=60,
                      TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        job.until(r'"trains"', 50)
        if "warm" in name:
            times = 2 if "standby" in name else 1
            job.until("(?s)" + ".*".join(["warm workers: imported what the next workers need"] * times), 50)
        time.sleep(2)
        with open(mark + ".go", "w"):
            pass
        ended = job.wait().want(0)
        again = [line for line in ended.said() if "again" in line][0]
        figure("%s: kill to step, s" % name, again["again"] - again["failed"])
        for message in ended.logged("warm"):
            print("    " + message)


# ---------------------------------------------------------------------------------------------------------------------


def perform(row):
    name, f, _, limit, gpu = row
    begun, place = time.monotonic(), Place(name, limit)
    verdict = "passed"
    try:
        if gpu and not OPTIONS.gpu:
            raise Skipped("it needs a GPU")
        f(place)
    except Skipped as e:
        verdict = "SKIPPED: %s" % e
    except BaseException:
        verdict = "FAILED: " + traceback.format_exc()
    finally:
        place.close()
    print("== %s: %.1f s: %s" % (name, time.monotonic() - begun, verdict), flush=True)
    return name, verdict


def main():
    global OPTIONS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default=os.path.join(HERE, "../../../../../bin"))
    parser.add_argument("--out", default="")
    parser.add_argument("--jobs", type=int, default=max(2, (os.cpu_count() or 2) // 2))
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("names", nargs="*")
    OPTIONS = parser.parse_args()
    OPTIONS.bin = os.path.abspath(OPTIONS.bin)
    OPTIONS.gpu = os.path.exists("/dev/nvidia0")
    if not OPTIONS.gpu and not OPTIONS.rehearse:
        print("there is no /dev/nvidia0: NOTHING WAS CHECKED", file=sys.stderr)
        return 2
    OPTIONS.out = OPTIONS.out or tempfile.mkdtemp(prefix="e2e-gpu-out-")
    os.makedirs(OPTIONS.out, exist_ok=True)
    wanted = [c for c in CHECKS if not OPTIONS.names or c[0].startswith(tuple(OPTIONS.names))]
    results = [perform(c) for c in wanted if c[2]]
    with concurrent.futures.ThreadPoolExecutor(OPTIONS.jobs) as pool:
        results += pool.map(perform, sorted((c for c in wanted if not c[2]), key=lambda c: -c[3]))
    with open(os.path.join(OPTIONS.out, "figures.json"), "w") as f:
        json.dump(FIGURES, f, indent=1)
    bad = [name for name, verdict in results if verdict.startswith("FAILED")]
    names = ": " + " ".join(bad) if bad else ""
    print("%d checks, %d failed%s; logs are in %s" % (len(results), len(bad), names, OPTIONS.out))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
