"""The shim with PyTorch."""

import json
import os
import socket
import unittest

import torch

from help import Case, HERE, SHIM

TRAIN, INIT, DATA, COMPILE, BUILD, EVAL, CHECKPOINT, END = range(1, 9)
VERSION = tuple(int(x) for x in torch.__version__.split(".")[:2])

RANK = """
    import torch, torch.distributed as dist, warnings
    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    def mine():
        return page(rank)
"""


class Torch(Case):
    path = [SHIM, HERE]

    def setUp(self):
        super().setUp()
        self.env.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))

    def world(self, code, ranks=2, **env):
        """What the ranks print."""
        all = [self.popen(RANK + code, RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(ranks), **env)
               for r in range(ranks)]
        try:
            return [self.end(p) for p in all]
        finally:
            for p in all:
                p.kill()
                p.communicate()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Worlds(Torch):
    def test_all_members_say_the_same(self):
        out = self.world("""
    dist.init_process_group("gloo")
    both, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(2)][rank]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    for x in torch.utils.data.DataLoader(torch.ones(12, 8), batch_size=2, num_workers=2):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    assert (mine().steps, mine().phase, mine().pid) == (6, 1, os.getpid()), vars(mine())
    for _ in range(7):
        dist.all_reduce(torch.ones(1), group=both)
        dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1))
    def shared(rank):
        p = page(rank)
        return {i: s for i, s in p.groups.items() if p.about.get(i, {}).get("ranks") == "0-1"}
    same = lambda: len(shared(0)) == 2 and shared(0) == shared(1)
    wait(same)
    if rank == 1:  # it does not enter what the other one waits in
        wait(lambda: sum(shared(0).values()) - sum(shared(1).values()) == 1)
    dist.all_reduce(torch.ones(1), group=both)
    wait(same)
    assert sorted(a["ranks"] for a in mine().about.values()) == sorted(["0-1", "0-1", str(rank)])
    dist.barrier()
    dist.destroy_process_group()
    wait(lambda: not mine().groups and not mine().about)  # the file is written after the page
    print(sorted(a["name"] for a in mine().about.values()))
        """)
        self.assertEqual(self.page(0).phase, END)
        self.assertEqual(out, ["[]\n", "[]\n"])

    def test_without_a_backend_that_is_named(self):
        if VERSION < (2, 0):
            self.skipTest("SKIPPED: 1.x wants a backend")
        self.world("""
    dist.init_process_group()
    wait(lambda: mine().groups)
    before = sum(mine().groups.values())
    dist.all_reduce(torch.ones(1))
    wait(lambda: sum(mine().groups.values()) == before + 1)
    dist.barrier()
        """)

    def test_older_names_of_variables(self):
        out = self.world("""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    print("TORCH_NCCL_TRACE_BUFFER_SIZE" in os.environ, "TORCH_NCCL_DUMP_ON_TIMEOUT" in os.environ)
    """, ranks=1, TORCH_NCCL_TRACE_BUFFER_SIZE="20", TORCH_FR_BUFFER_SIZE="20", TORCH_NCCL_DUMP_ON_TIMEOUT="1")
        self.assertEqual(out, ["%s True\n" % (VERSION < (2, 9))], "whose newer name is not set is the user's")

    def test_debugging(self):
        self.world("""
    dist.init_process_group("gloo")
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    wait(lambda: mine().groups)
    dist.barrier()
        """, TORCH_DISTRIBUTED_DEBUG="DETAIL")

    def test_a_world_that_does_not_come(self):
        self.run_code(RANK + """
    import datetime
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
        raise AssertionError
    except Exception as e:
        assert not isinstance(e, AssertionError)
    assert [s[0] for s in mine().spans] == [2] and mine().groups == {}
        """, WORLD_SIZE="2")

    def test_ends(self):
        """Whatever the thread is at, and however the program ends."""
        for end in ("", "dist.destroy_process_group()", "sys.exit(0)", "del dist, torch", "os.kill(os.getpid(), 2)"):
            p = self.popen(RANK + """
    import signal
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    dist.init_process_group("gloo")
    wait(lambda: mine().groups)
    %s
            """ % end, MASTER_PORT=str(free_port()))
            self.end(p)
            self.assertEqual(self.page().phase, END)


class Phases(Torch):
    def test_what_one_process_does(self):
        self.run_code(RANK + """
    import io
    model = torch.nn.Linear(1500, 1500)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    class Slow(io.BytesIO):
        def write(self, b):
            assert mine().phase == 7
            return super().write(b)
    f = Slow()
    torch.save(model.state_dict(), f)
    f.seek(0)
    model.load_state_dict(torch.load(f))
    assert mine().phase == 1 and [s[0] for s in mine().spans] == [7, 7], mine().spans
    assert torch.save is torch.serialization.save
    model.eval(); assert mine().phase == 6
    model.train(); assert mine().phase == 1

    import torch.utils.cpp_extension as e
    seen = []
    e._jit_compile = lambda *a, **k: seen.append(mine().phase)
    try:
        e.load("x", ["x.cpp"])
    except Exception:
        pass
    assert seen == [5] and mine().phase == 1, seen

    if not hasattr(torch, "compile"):  # later ones talk
        with torch.autograd.profiler.profile() as p:
            optimizer.step()
        assert [e.count for e in p.key_averages() if e.key == "Optimizer.step#SGD.step"] == [1]

    import copy, pickle
    m = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout()))
    assert not m.eval().training and m.train().training
    copy.deepcopy(torch.nn.Linear(2, 2)).eval()
    pickle.loads(pickle.dumps(torch.optim.SGD([torch.ones(1)], lr=0.1))).step()
    assert mine().steps == (2 if hasattr(torch, "compile") else 3)
        """)

    def test_distributed_checkpoints(self):
        if VERSION < (2, 2):
            self.skipTest("SKIPPED: torch.distributed.checkpoint is another one before 2.2")
        self.run_code(RANK + """
    import torch.distributed.checkpoint as dcp
    dist.init_process_group("gloo")
    state = {"w": torch.ones(1000)}
    dir = os.path.join(os.environ["DLROVER_HANG_DIR"], "dcp")
    dcp.save(state, checkpoint_id=dir)
    dcp.load(state, checkpoint_id=dir)
    dcp.async_save(state, checkpoint_id=dir).result()
    assert [s[0] for s in mine().spans].count(7) >= 3, mine().spans
    dist.destroy_process_group()
        """)

    def test_workers_of_data_loaders(self):
        self.run_code(RANK + """
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, i):
            import _dlrover_hang.worker as w
            o = torch.optim.SGD([torch.ones(1)], lr=0.1)
            o.step(); torch.save(i, "/dev/null")
            assert mine().pid == os.getppid() and w._words is None
            return i
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    optimizer.step()
    # Another method, which is the default from Python 3.14 on, would not find Data in what -c has run.
    assert len(list(torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork"))) == 4
    assert (mine().steps, mine().phase) == (1, 1) and 3 in [s[0] for s in mine().spans]
        """)


class Compile(Torch):
    def setUp(self):
        super().setUp()
        if VERSION < (2, 0):
            self.skipTest("SKIPPED: there is no torch.compile")

    def test_steps_and_phases(self):
        """Compiled steps are counted by what surrounds them, and compile as they do without the shim."""
        code = RANK + """
    import logging; logging.disable(logging.CRITICAL)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def f():
        optimizer.step()
    for step in (torch.compile(optimizer.step, backend="eager"), torch.compile(f, backend="eager")):
        for _ in range(4):
            optimizer.zero_grad()
            torch.compile(model, backend="eager")(torch.ones(2, 4)).sum().backward()
            step()
    assert not torch.compile(lambda x: model.eval()(x), backend="eager")(torch.ones(2, 4)).isnan().any()
    import torch._dynamo.utils as u
    print(u.counters["graph_break"], u.counters["stats"])
    if os.environ["DLROVER_HANG_DIR"]:
        p = mine()
        assert 5 <= p.steps <= 8 and 4 in [s[0] for s in p.spans], (p.steps, p.spans)
        """
        self.assertEqual(self.run_code(code), self.run_code(code, DLROVER_HANG_DIR=""))

    def test_whole_graphs(self):
        """What compiles as one graph without the shim does with it."""
        self.run_code(RANK + """
    import logging; logging.disable(logging.CRITICAL)
    model = torch.nn.Linear(4, 4)
    def f(x):
        model.train()
        return model(x)
    def run():
        try:
            torch.compile(f, backend="eager", fullgraph=True)(torch.ones(2, 4))
            return True
        except Exception:
            return False
    with_us = run()
    torch.nn.Module.train = torch.nn.Module.train.__wrapped__
    torch._dynamo.reset()
    assert with_us == run()
        """)


TIMELINE = """
    import json, struct, torch, warnings
    import torch.autograd.profiler as autograd
    warnings.simplefilter("ignore")
    pages, out = os.environ["DLROVER_HANG_DIR"], os.environ["OUT"]
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def steps(n):
        for _ in range(n):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    def want(n, path=out):
        with open(pages + "/l0.timeline", "w") as f:
            json.dump({"path": path, "steps": n}, f)
        with open(pages + "/l0.page", "r+b") as f:
            f.seek(104)
            f.write(struct.pack("<Q", 77))
    def word():
        with open(pages + "/l0.page", "rb") as f:
            return struct.unpack("<512Q", f.read())[13]
    def done():
        with open(pages + "/l0.timeline.done") as f:
            d = json.load(f)
        os.unlink(f.name)
        assert word() == 0 and d["word"] == 77, (word(), d)
        assert functions == [getattr(autograd, n) for n in names]
        return d["steps"], d["path"] == out, d["error"]
    def names_of(path=out):
        with open(path) as f:
            trace = json.load(f)
        return {e.get("name") for e in (trace["traceEvents"] if isinstance(trace, dict) else trace)}
    names = ["_prepare_profiler", "_enable_profiler"]
    functions = [getattr(autograd, n) for n in names]
    cpu = [torch.profiler.ProfilerActivity.CPU]
    steps(3)
    assert "_dlrover_hang.timeline" not in sys.modules
"""


class Timelines(Torch):
    def recorded(self, code, last=None):
        """Runs it, and returns what became of the timeline that was wanted last. PyTorch's profiler is not quiet."""
        out = os.path.join(self.dir, "t.json")
        p = self.popen(TIMELINE + code, OUT=out)
        text, err = p.communicate(timeout=300)
        self.assertEqual(p.returncode, 0, err)
        if last is not None:
            with open(os.path.join(self.pages, "l0.timeline.done")) as f:
                d = json.load(f)
            self.assertEqual((d["steps"], d["path"] == out, d["error"]), last)
        return text

    def test_steps_are_recorded(self):
        self.recorded("""
    for n in (3, 1):
        want(n)
        steps(1)
        assert word() == 77 | 1 << 63, word()
        steps(n)
        assert done() == (n, True, "")
        assert "aten::addmm" in names_of()
        os.unlink(out)
    assert not [f for f in os.listdir(os.path.dirname(out)) if f.endswith(".new")]
""")

    def test_the_jobs_own_profiler_comes_first(self):
        self.recorded("""
    want(50)
    steps(3)
    with torch.profiler.profile(activities=cpu) as own:
        steps(2)
    assert own.key_averages()
    assert done() == (2, True, "the job has begun to profile itself")
    assert "aten::addmm" in names_of()
    want(1)
    with torch.profiler.profile(activities=cpu) as own:
        steps(2)
    assert own.key_averages()
    assert done() == (0, False, "the job's own profiler runs")
    want(2)
    steps(3)
    assert done() == (2, True, "")
""")

    def test_a_step_is_not_lost_by_what_fails(self):
        self.recorded("""
    want(1, "/none/such/t.json")
    steps(2)
    n, path, why = done()
    assert (n, path) == (1, False) and "No such file" in why, why
    with open(pages + "/l0.timeline", "w") as f:
        f.write("{")
    with open(pages + "/l0.page", "r+b") as f:
        f.seek(104)
        f.write(struct.pack("<Q", 77))
    steps(1)
    assert "JSONDecodeError" in done()[2]
    want(1)
    kineto = torch.profiler.profiler._KinetoProfile
    begin = kineto.start
    def start(self):
        begin(self)
        json.loads("}")
    kineto.start = start
    steps(1)
    kineto.start = begin
    assert "JSONDecodeError" in done()[2]
    assert not torch.autograd._profiler_enabled()
    assert page().steps == 3 + 2 + 1 + 1, page().steps
""")

    def test_a_signal_handler_of_the_job_raises(self):
        self.recorded("""
    class Late(Exception):
        pass
    kineto = torch.profiler.profiler._KinetoProfile
    begin = kineto.start
    def handler():
        raise Late  # as one that has interrupted the profiler
    def start(self):
        handler()
    kineto.start = start
    want(1)
    try:
        steps(1)
        raise AssertionError("it is not ours to catch")
    except Late:
        pass
    kineto.start = begin
    assert done()[2].endswith("Late")
    want(1)
    steps(2)
    assert done() == (1, True, "")
""")

    def test_other_threads_and_processes(self):
        self.recorded("""
    import threading
    want(2)
    steps(1)
    t = threading.Thread(target=optimizer.step)
    t.start()
    t.join()
    steps(2)
    assert done() == (2, True, "")
    want(50)
    steps(2)
    if os.fork() == 0:
        ok = functions == [getattr(autograd, n) for n in names] and not torch.autograd._profiler_enabled()
        os._exit(0 if ok else 1)
    assert os.wait()[1] == 0
    assert done() == (1, True, "the process has forked")
    want(50)
    steps(2)
    def profiled():
        with torch.profiler.profile(activities=cpu) as own:
            torch.ones(1) + 1
        assert own.key_averages()
        names.append("seen")
    t = threading.Thread(target=profiled)
    t.start()
    t.join()
    assert names.pop() == "seen"
    steps(1)
    assert done() == (2, False, "the job has begun to profile itself in another thread")
    want(1)
    steps(2)
    assert done() == (1, True, "")
""")

    def test_it_ends_without_all_steps(self):
        self.recorded("""
    import threading
    def put(n):
        with open(pages + "/l0.page", "r+b") as f:
            f.seek(104)
            f.write(struct.pack("<Q", n))
    put(1)
    steps(1)
    assert word() == 0, "nothing ran"
    want(50)
    steps(2)
    put(1)
    steps(1)
    assert done() == (2, False, "nobody waits for it any more")
    assert not os.path.exists(out) and not torch.autograd._profiler_enabled()
    want(50)
    steps(2)
    put(78)  # who withdrew it wants another one
    steps(1)
    assert word() == 78, word()
    want(50)
    steps(1)
    from _dlrover_hang import timeline
    timeline._running._until = 0
    steps(1)
    assert done() == (1, True, "it has taken too long")
    want(50)
    t = threading.Thread(target=steps, args=(3,))
    t.start()
    t.join()
    assert done() == (2, True, "the thread that was recorded has ended")
    want(1)
    steps(2)
    assert done() == (1, True, "")
""")

    def test_the_end_of_the_job(self):
        self.recorded("""
    want(50)
    steps(3)
""", (2, True, "the process has ended"))


SECONDS = TIMELINE + """
    import threading
    stop = False
    def the_users_function():
        steps(1)
        time.sleep(0.01)
    def compute():
        model = torch.nn.Linear(4, 4)
        while not stop:
            model(torch.ones(1, 4)).sum().backward()
            time.sleep(0.01)
    WORD = 77 | 1 << 62
    def profile(seconds, path=out):
        with open(pages + "/l0.timeline", "w") as f:
            json.dump({"path": path, "seconds": seconds}, f)
        with open(pages + "/l0.page", "r+b") as f:
            f.seek(104)
            f.write(struct.pack("<Q", WORD))
    def result():
        while word():
            the_users_function()
        with open(pages + "/l0.timeline.done") as f:
            d = json.load(f)
        os.unlink(f.name)
        assert d["word"] == WORD and functions == [getattr(autograd, n) for n in names], d
        return d
"""


@unittest.skipIf(VERSION < (2, 7), "SKIPPED: PROFILES ARE NOT TESTED: this PyTorch cannot record all threads")
class Profiles(Torch):
    """Of all threads, for seconds."""

    def profiled(self, code):
        p = self.popen(SECONDS + code, OUT=os.path.join(self.dir, "t.json"))
        text, err = p.communicate(timeout=300)
        self.assertEqual(p.returncode, 0, err)
        return text

    def test_all_threads_are_recorded(self):
        self.profiled("""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    t = threading.Thread(target=compute)
    t.start()
    profile(1)
    d = result()
    stop = True
    t.join()
    assert (d["path"], d["error"]) == (out, "") and 0.9 < d["seconds"] < 30 and d["steps"] > 3, d
    with open(out) as f:
        trace = json.load(f)
    assert trace["wait_counters"], trace.keys()
    of = {}
    for e in trace["traceEvents"]:
        of.setdefault(e.get("name"), set()).add(e.get("tid"))
    assert len(of["aten::addmm"]) == 2, of["aten::addmm"]
    assert [n for n in of if n and "the_users_function" in n], len(of)
    assert [f for f in os.listdir(os.path.dirname(out)) if f.endswith(".json")] == ["t.json"]
    profile(0.1, "/none/such/t.json")
    assert "No such file" in result()["error"]
    want(2)
    steps(3)
    assert done() == (2, True, "")
""")

    def test_what_comes_first(self):
        self.profiled("""
    profile(50)
    while not word() >> 63:
        steps(1)
    time.sleep(0.3)
    with torch.profiler.profile(activities=cpu) as own:
        steps(2)
    assert own.key_averages()
    d = result()
    assert (d["path"], d["error"]) == (out, "the job has begun to profile itself"), d
    with torch.profiler.profile(activities=cpu) as own:
        profile(1)
        d = result()
    assert (d["path"], d["error"]) == ("", "the job's own profiler runs"), d
    assert own.key_averages()
    profile(50)
    while not word() >> 63:
        steps(1)
    time.sleep(0.3)
    if os.fork() == 0:
        os._exit(0 if functions == [getattr(autograd, n) for n in names] and not sys.getprofile() else 1)
    assert os.wait()[1] == 0
    d = result()
    assert (d["path"], d["error"]) == (out, "the process has forked"), d
""")

    def test_it_ends_early(self):
        self.profiled("""
    def begun():
        profile(50)
        while not word() >> 63:
            steps(1)
        time.sleep(0.3)
    from _dlrover_hang import timeline
    begun()
    with open(pages + "/l0.page", "r+b") as f:
        f.seek(104)
        f.write(struct.pack("<Q", 1))
    d = result()
    assert (d["path"], d["error"]) == ("", "nobody waits for it any more"), d
    timeline._ROOM = 64 << 20
    begun()
    block = bytearray(os.urandom(1 << 20) * 200)
    d = result()
    assert (d["path"], d["error"]) == (out, "it has taken 64 MiB of memory"), d
    os.unlink(out)
    begun()
""")
        with open(os.path.join(self.pages, "l0.timeline.done")) as f:
            self.assertEqual(json.load(f)["error"], "the process has ended")
        with open(os.path.join(self.dir, "t.json")) as f:
            self.assertTrue(json.load(f)["traceEvents"])


class Recorders(Torch):
    """The flight recorder of gloo, which has no fifo of its own."""

    def asked(self, **env):
        """What a worker prints that has been asked once."""
        return self.run_code("""
    import torch, torch.distributed as dist, warnings
    warnings.simplefilter("ignore")
    at = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(2))
    has = hasattr(torch._C._distributed_c10d, "_dump_fr_trace_file")
    end = time.monotonic() + (20 if has else 2)
    while not os.path.exists(at + "0.pipe") and time.monotonic() < end:
        time.sleep(0.05)
    assert os.path.exists(at + "0.pipe") == has, (has, torch.__version__)
    if has:
        assert os.stat(at + "0.pipe").st_mode & 0o77 == 0
        fd = os.open(at + "0.pipe", os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, b"1")
        wait(lambda: os.path.exists(at + "0") and b"all_reduce" in open(at + "0", "rb").read())
    print("whole" if has else "none")
""", TORCH_NCCL_DEBUG_INFO_PIPE_FILE=self.pages + "/f_", TORCH_FR_DUMP_TEMP_FILE=self.pages + "/f_",
                             TORCH_FR_BUFFER_SIZE="100", **env)

    def test_gloo_is_asked_as_nccl_is(self):
        self.assertIn(self.asked(), ("whole\n", "none\n"))


class ProfilesOfOlder(Torch):
    def test_they_are_refused(self):
        """By one line, and nothing is left of it."""
        self.popen_ended(SECONDS + """
    torch._C._profiler._ExperimentalConfig = lambda: None
    profile(1)
    d = result()
    assert not d["path"] and d["error"].startswith("a profile needs PyTorch 2.7 or newer, and this is "), d
    want(2)
    steps(3)
    assert done() == (2, True, "")
""")

    def popen_ended(self, code):
        p = self.popen(code, OUT=os.path.join(self.dir, "t.json"))
        text, err = p.communicate(timeout=300)
        self.assertEqual(p.returncode, 0, err)


if __name__ == "__main__":
    unittest.main()