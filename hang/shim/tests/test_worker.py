"""Who claims a page, and what it says, with a PyTorch that consists of little else than what the shim watches."""

import os
import signal
import unittest
import unittest.mock

from help import Case, FAKE, HERE, SHIM

TRAIN, INIT, DATA, COMPILE, BUILD, EVAL, CHECKPOINT, END = range(1, 9)


class Worker(Case):
    path = [SHIM, HERE, FAKE]


class Claims(Worker):
    def test_an_import_claims_nothing(self):
        self.run_code("""
            import torch, torch.distributed
            torch.save(0, None); list(torch.utils.data.DataLoader([1])); torch.nn.Module().eval()
            assert os.listdir(os.environ["DLROVER_HANG_DIR"]) == []
            assert len(os.listdir("/proc/self/task")) == 1
        """)

    def test_a_step_does(self):
        for version in ("1.13", "2.1"):
            self.run_code("""
                import torch
                o = torch.optim.Optimizer()
                before = time.monotonic_ns()
                for _ in range(3):
                    o.step()
                p = page()
                assert (p.pid, p.rank, p.world_size, p.local) == (os.getpid(), 5, 8, 1), vars(p)
                assert (p.steps, p.phase) == (3, 1) and before < p.created <= p.since * 1000 + 999
                assert p.step_times == sorted(p.step_times) and p.step_times[-1] == p.last_step, p.step_times
                stat = open("/proc/self/stat").read().rpartition(")")[2].split()
                assert p.start == int(stat[19])
            """.replace("page()", "page(1)"), FAKE_TORCH=version, RANK="5", LOCAL_RANK="1", WORLD_SIZE="8")
            self.assertEqual(self.claimed(), ["l1.page"])

    def test_a_process_group_does_while_it_is_made(self):
        self.run_code("""
            import torch.distributed as dist
            class Asked(Exception):
                def __bool__(self):
                    assert page().phase == 2
                    return True
            try:
                dist.init_process_group(Asked())
            except Asked:
                pass
            p = page()
            assert (p.steps, p.phase, p.groups) == (0, 0, {}), vars(p)
        """)

    def test_the_thread_that_trains(self):
        """The one that makes the process group, until another one makes steps; threads that PyTorch starts do not."""
        self.run_code("""
            import _thread, threading, torch, torch.distributed as dist
            dist.init_process_group()
            assert page().thread == os.getpid()
            tids = []
            def train():
                tids.append(threading.get_native_id())
                torch.optim.Optimizer().step()
                assert page().thread == tids[-1]
            for _ in range(2):
                t = threading.Thread(target=train)
                t.start(); t.join()
            assert page().thread == tids[1]
            def helps():
                threading.current_thread()  # as logging does; it makes one of threading's objects for it
                torch.optim.Optimizer().step()
                done.release()
            done = threading.Lock()
            done.acquire()
            _thread.start_new_thread(helps, ())
            done.acquire()
            assert (page().thread, page().steps) == (tids[1], 3), vars(page())
            torch.optim.Optimizer().step()
            assert page().thread == os.getpid()
        """)

    def test_environments_that_name_no_worker(self):
        for env in ({"RANK": ""}, {"RANK": "x"}, {"RANK": "1"}, {"RANK": "-1"}, {"LOCAL_RANK": "1"},
                    {"WORLD_SIZE": "0"}, {"DLROVER_HANG_DIR": "/nowhere"}, {"DLROVER_HANG_DIR": "/proc"},
                    {"LOCAL_RANK": "../../x"}, {"WORLD_SIZE": "99999999999", "RANK": "99999999998"}):
            self.run_code("import torch; torch.optim.Optimizer().step()", **env)
        self.assertEqual(self.claimed(), [])

    def test_scripts_change_their_environment(self):
        """As those do that hide all devices but one."""
        self.run_code("""
            os.environ["LOCAL_RANK"] = "0"
            del os.environ["RANK"]
            import torch
            torch.optim.Optimizer().step()
        """, LOCAL_RANK="3", RANK="7", WORLD_SIZE="8")
        self.assertEqual(self.claimed(), ["l3.page"])
        self.assertEqual(self.page(3).rank, 7)

    def test_children_of_the_worker_do_not(self):
        self.run_code("""
            import multiprocessing, subprocess, torch, torch.distributed as dist
            dist.init_process_group()
            o = torch.optim.Optimizer(); o.step()
            def train():
                import torch, torch.distributed as dist
                dist.init_process_group(); torch.optim.Optimizer().step()
                if torch.save is None or len(os.listdir("/proc/self/task")) != 1:
                    os._exit(1)
            child = multiprocessing.get_context("fork").Process(target=train)
            child.start(); child.join()
            assert child.exitcode == 0
            pid = os.fork()
            if pid == 0:
                train()
                o.step(); torch.save(0, None)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            code = "import torch, torch.distributed as d; d.init_process_group(); torch.optim.Optimizer().step()"
            subprocess.check_call([sys.executable, "-c", code])
            subprocess.check_call([sys.executable, "-c", "import os, sys; os.fork() or sys.exit(); " + code])
            time.sleep(0.1)
            p = page()
            assert (p.pid, p.steps, p.phase) == (os.getpid(), 1, 1), vars(p)
            o.step()
            assert page().steps == 2
        """)

    def test_a_child_that_trains_first_loses_the_page(self):
        """A helper of the worker has a process group of its own; then the worker begins to train."""
        self.run_code("""
            import subprocess, torch
            code = ("import sys, torch; o = torch.optim.Optimizer(); o.step(); print('claimed', flush=True); "
                    "sys.stdin.readline(); o.step()")
            child = subprocess.Popen(["sh", "-c", "exec 3<&0; \\"$0\\" -c \\"$1\\" <&3; true", sys.executable, code],
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, universal_newlines=True)
            assert child.stdout.readline() == "claimed\\n"
            assert page().pid not in (0, os.getpid())
            torch.optim.Optimizer().step()
            assert page().pid == os.getpid()
            child.communicate("go on\\n")
            p = page()
            assert (p.pid, p.steps, child.returncode) == (os.getpid(), 1, 0), vars(p)
        """)
        self.assertEqual(self.claimed(), ["l0.page"])

    def test_a_program_before_the_worker(self):
        """Of a shell that runs several: the page of one that has ended is free, also where its pid is used again."""
        code = "import torch; torch.optim.Optimizer().step(); print(page().pid)"
        first, second = self.run_code(code), self.run_code(code)
        self.assertNotEqual(first, second)
        self.assertEqual(self.page().pid, int(second))
        with open(os.path.join(self.pages, "l0.page"), "r+b") as f:
            f.seek(8)
            f.write(os.getpid().to_bytes(8, "little"))  # with another start
        third = self.run_code(code)
        self.assertEqual(self.page().pid, int(third))
        self.assertEqual(self.claimed(), ["l0.page"])

    def test_a_worker_that_executes_itself_anew(self):
        self.run_code("""
            import torch
            torch.optim.Optimizer().step(); torch.optim.Optimizer().step()
            os.execv(sys.executable, [sys.executable, "-c", "import torch; torch.optim.Optimizer().step()"])
        """)
        self.assertEqual(self.page().steps, 1)

    def test_a_stranger_keeps_its_page(self):
        stranger = self.popen("import torch; torch.optim.Optimizer().step(); print(1, flush=True); input()")
        self.assertEqual(stranger.stdout.readline(), "1\n")
        self.run_code("import torch; torch.optim.Optimizer().step()")
        self.assertEqual(self.page().pid, stranger.pid)
        self.end(stranger, 1, stderr=unittest.mock.ANY)
        self.assertEqual(self.claimed(), ["l0.page"])

    def test_a_fork_with_an_environment_of_its_own(self):
        """A template imports PyTorch, and its children become workers."""
        self.run_code("""
            import torch, torch.distributed as dist
            for local in range(2):
                if os.fork() == 0:
                    os.environ.update(RANK=str(4 + local), LOCAL_RANK=str(local), WORLD_SIZE="6")
                    o = torch.optim.Optimizer()
                    for _ in range(local + 1):
                        o.step()
                    dist.init_process_group()
                    wait(lambda: page(local).groups)
                    sys.exit(0)
            for _ in range(2):
                assert os.wait()[1] == 0
        """, RANK="", LOCAL_RANK="")
        self.assertEqual([(self.page(i).rank, self.page(i).steps, self.page(i).phase) for i in range(2)],
                         [(4, 1, END), (5, 2, END)])
        self.assertEqual(self.claimed(), ["l0.groups", "l0.page", "l1.groups", "l1.page"])

    def test_a_page_that_goes(self):
        self.run_code("""
            import shutil, torch, torch.distributed as dist
            torch.optim.Optimizer().step()
            shutil.rmtree(os.environ["DLROVER_HANG_DIR"])
            dist.init_process_group()
            torch.optim.Optimizer().step()
            time.sleep(0.7)
            torch.optim.Optimizer().step()
        """)
        os.mkdir(self.pages)

    def test_the_tree_goes(self):
        """Somebody wants a timeline of a worker whose launcher has gone: nothing comes of it."""
        self.run_code("""
            import shutil, tempfile
            tree = tempfile.mkdtemp()
            shutil.copytree(os.path.dirname(sys.modules["_dlrover_hang"].__file__), tree + "/_dlrover_hang")
            sys.modules["_dlrover_hang"].__path__[:] = [tree + "/_dlrover_hang"]
            import struct, torch
            o = torch.optim.Optimizer()
            o.step()
            shutil.rmtree(tree)
            with open(os.environ["DLROVER_HANG_DIR"] + "/l0.page", "r+b") as f:
                f.seek(104)
                f.write(struct.pack("<Q", 77))
                f.flush()
                o.step()
                f.seek(104)
                assert f.read(8) == bytes(8)
            assert page().steps == 2
        """)

    def test_no_room(self):
        """A page is written before it is mapped: no signal later."""
        self.run_code("""
            import resource, torch
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            torch.optim.Optimizer().step()
            torch.save(0, None)
        """)
        self.assertEqual(self.claimed(), [])

    def test_no_descriptors(self):
        self.run_code("""
            import resource, torch
            torch.save(0, None)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
            torch.optim.Optimizer().step()
        """)
        self.assertEqual(self.claimed(), [])

    def test_descriptors_that_are_closed_behind_its_back(self):
        self.run_code("""
            import torch
            o = torch.optim.Optimizer(); o.step()
            os.closerange(3, 100)
            kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(10)]
            o.step()
            pid = os.fork()
            if pid == 0:
                import gc; gc.collect(); o.step()
                for fd in kept:
                    os.fstat(fd)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            assert page().steps == 2
        """)

    def test_killed_while_it_claims(self):
        """What it leaves is in nobody's way."""
        for name in ("l0.page.1.new", "l0.page.%d.new" % os.getpid()):
            with open(os.path.join(self.pages, name), "w") as f:
                f.write("half")
        self.run_code("import torch; torch.optim.Optimizer().step(); assert page().steps == 1")

    def test_a_page_that_is_damaged(self):
        for content in (b"", b"x" * 5000):
            with open(os.path.join(self.pages, "l0.page"), "wb") as f:
                f.write(content)
            self.run_code("import torch; torch.optim.Optimizer().step(); assert page().steps == 1")

    def test_several_at_once(self):
        all = [self.popen("import torch; torch.optim.Optimizer().step(); print(1, flush=True); sys.stdin.read(1)")
               for _ in range(4)]
        for p in all:
            p.stdout.readline()
        pages = self.page()
        for p in all:
            self.end(p)
        self.assertIn(pages.pid, [p.pid for p in all])
        self.assertEqual((pages.steps, self.claimed()), (1, ["l0.page"]))


class Phases(Worker):
    def test_one_within_another(self):
        self.run_code("""
            import torch
            torch.optim.Optimizer().step()
            inside = []
            def batch():
                inside.append(page().phase)
                torch.save(0.01, None)
                inside.append(page().phase)
            for _ in torch.utils.data.DataLoader([batch]):
                inside.append(page().phase)
            assert inside == [3, 3, 1], inside
            assert [s[0] for s in page().spans] == [7, 3] and 0.01 <= page().spans[0][1] <= page().spans[1][1]
        """)

    def test_checkpoints_block(self):
        self.run_code("""
            import torch
            torch.save(0.05, None)
            torch.optim.Optimizer().step()
            assert page().blocked == 0  # that was before the first step
            for seconds in 0.01, 0.02:
                torch.save(seconds, None)
            assert abs(page().blocked - sum(s[1] for s in page().spans[-2:])) < 1e-6 < page().blocked - 0.03, vars(page())
        """)

    def test_exceptions_are_the_users(self):
        self.run_code("""
            import torch, traceback
            torch.optim.Optimizer().step()
            try:
                torch.load("x")
            except ValueError as e:
                assert e.args == ("x",) and e.__context__ is None
            assert page().phase == 1
            assert next(iter(torch.utils.data.DataLoader([])), None) is None
        """)

    def test_evaluation(self):
        self.run_code("""
            import torch
            o, m = torch.optim.Optimizer(), torch.nn.Module()
            o.step()
            assert m.eval() is m and not m.training and page().phase == 6
            for _ in torch.utils.data.DataLoader([1]):
                assert page().phase == 6
            m.eval()
            time.sleep(0.002)
            assert m.train() is m and m.training and page().phase == 1
            assert [s[0] for s in page().spans] == [6]
            for i in range(5):  # a model that is no part of the training: it is seen through
                m.eval()
                assert page().phase == (6 if i < 3 else 1), i
                o.step()
                assert page().phase == 1
            m.train(False)
            assert page().phase == 1
        """)

    def test_other_threads_have_none(self):
        self.run_code("""
            import torch, threading
            torch.optim.Optimizer().step()
            t = threading.Thread(target=torch.save, args=(0.1, None))
            t.start()
            phases = []
            while t.is_alive():
                phases.append(page().phase)
            assert set(phases) == {1} and page().spans == []
        """)

    def test_the_thread_that_trains_has_them(self):
        self.run_code("""
            import torch, threading
            def train():
                torch.optim.Optimizer().step()
                torch.save(0.002, None)
            t = threading.Thread(target=train)
            t.start(); t.join()
            assert [s[0] for s in page().spans] == [7]
        """)

    def test_a_signal_in_the_middle(self):
        """A handler that saves and raises, whatever it interrupts."""
        self.run_code("""
            import random, signal, torch
            o = torch.optim.Optimizer(); o.step()
            class Stop(Exception): pass
            def handler(*_):
                torch.save(0, None)
                raise Stop
            signal.signal(signal.SIGALRM, handler)
            for _ in range(300):
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-3))
                    while True:
                        for _ in torch.utils.data.DataLoader([1]):
                            o.step()
                except Stop:
                    pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            o.step()
            assert page().phase == 1
            n = page().steps
            o.step()
            assert page().steps == n + 1
        """)

    def test_rings(self):
        self.run_code("""
            import torch
            o = torch.optim.Optimizer()
            for i in range(500):
                o.step()
                if i % 3 == 0:
                    torch.save(0.0011, None)
            p = page()
            assert p.steps == 500 and len(p.step_times) == 191 and p.step_times == sorted(p.step_times)
            assert len(p.spans) == 63 and {s[0] for s in p.spans} == {7}
        """)

    def test_the_end(self):
        self.run_code("""
            import atexit, torch, torch.distributed as dist
            def late():
                p = page()
                assert p.phase == 8 and p.since * 1000 + 999 >= p.last_step, vars(p)
                torch.save(0, None)
                time.sleep(0.7)
                assert page().heartbeat == p.heartbeat
            atexit.register(late)
            dist.init_process_group()
            torch.optim.Optimizer().step()
        """)
        self.assertEqual(self.page().phase, END)

    def test_ends_that_are_not_said(self):
        for code, rc in (("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", -9), ("sys.exit(4)", 4)):
            self.end(self.popen("import torch; torch.optim.Optimizer().step(); " + code), rc)
            self.assertEqual(self.page().phase, END if rc == 4 else TRAIN)

    def test_many_ends(self):
        """The thread is wherever it is."""
        for i in range(10):
            self.run_code("""
                import torch, torch.distributed as dist
                dist.init_process_group()
                torch.optim.Optimizer().step()
                time.sleep(0.45 + %d / 100)
            """ % i)


class Groups(Worker):
    def test_numbers(self):
        self.run_code("""
            import torch, torch.distributed as dist
            c10d = sys.modules["torch.distributed.distributed_c10d"]
            dist.init_process_group()
            g = dist.new_group([0, 2, 3])
            no = dist.new_group([0]); no.seq = -1
            wait(lambda: len(page().groups) == 2)
            p = page()
            about = sorted((a["name"], a["desc"], a["backend"], a["ranks"]) for a in p.about.values())
            assert about == [("0", "of tests", "cpu:gloo", "0-7"), ("1", "of tests", "cpu:gloo", "0,2-3")], about
            assert set(p.about) == set(p.groups) and (p.seq("0"), p.seq("1")) == (0, 0)
            g.seq = 41
            wait(lambda: page().seq("1") == 41)
            o = torch.optim.Optimizer()
            o.step(); o.step()
            g.seq, c10d.GroupMember.WORLD.seq = 42, 1
            time.sleep(0.06); o.step(); time.sleep(0.06); o.step()  # each of them takes along one group
            assert (page().seq("0"), page().seq("1")) == (1, 42)
            beat = page().heartbeat
            wait(lambda: page().heartbeat > beat)
            import weakref, gc
            w = weakref.ref(g)
            dist.destroy_process_group(g)
            del g
            wait(lambda: len(page().groups) == 1)
            wait(lambda: gc.collect() and False or w() is None)
        """, WORLD_SIZE="8")
        self.assertEqual(self.claimed(), ["l0.groups", "l0.page"])

    def test_ids_are_the_same_in_all_members_and_not_in_the_next_world(self):
        code = """
            import torch.distributed as dist
            ids = []
            for fails in (True, False, False):
                try:
                    dist.init_process_group(OSError() if fails else None)
                except OSError:
                    continue
                wait(lambda: page(LOCAL).groups and not set(page(LOCAL).groups) & set(ids))
                ids += page(LOCAL).groups
            print(ids)
        """
        got = [self.run_code(code.replace("LOCAL", str(r)), RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE="2")
               for r in range(2)]
        self.assertEqual(got[0], got[1])
        self.assertEqual(len(eval(got[0])), 2)

    def test_another_world_than_the_launchers(self):
        """Its ranks are others."""
        self.run_code("""
            import torch.distributed as dist
            dist.init_process_group(world_size=3)
            time.sleep(1.2)
            assert page().groups == {} and page().heartbeat > page().created
        """)

    def test_more_than_there_is_room_for(self):
        self.run_code("""
            import torch, torch.distributed as dist
            import _dlrover_hang.groups as groups
            groups._IDLE = 10**8
            dist.init_process_group()
            all = [dist.new_group([0]) for _ in range(100)]
            wait(lambda: len(page().groups) == 48)
            for _ in range(3):
                torch.optim.Optimizer().step()
            name = [str(i) for i in range(101)]
            def there(g, i):
                g.seq += 1
                return name[i] in [a["name"] for a in page().about.values()]
            wait(lambda: there(all[-1], 100))
            wait(lambda: there(all[10], 11))
            wait(lambda: set(page().groups) <= set(page().about) and len(page().groups) <= 48)
        """)

    def test_groups_of_python_are_not_asked(self):
        self.run_code("""
            import torch.distributed as dist
            c10d = sys.modules["torch.distributed.distributed_c10d"]
            class Mine(c10d.ProcessGroup):
                def _get_sequence_number_for_group(self):
                    os._exit(9)
            dist.init_process_group()
            c10d._world.add(Mine([0], 0), [0])
            wait(lambda: page().groups)
            time.sleep(0.6)
        """)

    def test_a_thousand_ranks(self):
        self.run_code("""
            import torch.distributed as dist
            dist.init_process_group()
            dist.new_group(range(0, 16384, 2))
            wait(lambda: len(page().groups) == 2)
            assert sorted(len(a["ranks"]) for a in page().about.values())[0] == len("0-16383")
        """, WORLD_SIZE="16384")


class Stopped(Worker):
    def test_a_page_of_one_that_is_stopped_can_be_read(self):
        p = self.popen("""
            import torch
            o = torch.optim.Optimizer(); o.step(); print(1, flush=True)
            while True:
                o.step()
        """)
        self.addCleanup(p.communicate)
        self.addCleanup(p.kill)
        p.stdout.readline()
        for _ in range(200):
            os.kill(p.pid, signal.SIGSTOP)
            page = self.page()
            self.assertIn(page.phase, (TRAIN,))
            times = page.step_times
            self.assertEqual(times[2:], sorted(times[2:]))
            os.kill(p.pid, signal.SIGCONT)


if __name__ == "__main__":
    unittest.main()
