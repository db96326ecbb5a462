"""Runs a function of Python in several processes, under the program dlrover-run, and returns the results."""
import codecs
import functools
import json
import os
import pickle
import re
import selectors
import signal
import subprocess
import sys
import tempfile
from collections import namedtuple
from datetime import datetime

import dlrover_run
from dlrover_run import worker

Failure = namedtuple("Failure", "rank local_rank pid exitcode timestamp message traceback")


class ChildFailedError(Exception):
    """The job has failed.

    failures: the workers of this node that have failed, a Failure by rank, the first one first. It is empty if another
    node is to blame, or no worker. verdict: the cause in one line. status: that of dlrover-run.
    """

    def __init__(self, name, status, verdict, failures):
        super().__init__(name, status, verdict, failures)
        self.name, self.status, self.verdict, self.failures = name, status, verdict, failures

    def get_first_failure(self):
        """Returns the rank and the Failure of the worker that failed first, as torch's error does."""
        return next(iter(self.failures.items()))

    def __str__(self):
        text = "%s: %s (exit status %d of dlrover-run)" % (self.name, self.verdict, self.status)
        traces = [f.traceback for f in self.failures.values() if f.traceback]
        return text + "\n\n" + traces[0] if traces else text


def launch(fn, args=(), **options):
    """Calls fn(*args) in every worker of a job of dlrover-run, and returns a dict of the results by rank.

    options are those of the command line, as --nproc-per-node=2 is nproc_per_node=2. True: the option alone. A list:
    the option for each element. A dict: KEY=VALUE,... None and False: not given. The dict has the ranks of this node.

    ChildFailedError: the job has failed. ValueError: dlrover-run refuses the options. Unsendable: the function, an
    argument or a result cannot be pickled. KeyboardInterrupt and other exceptions of this process stop the job.
    """
    name = name_of(fn)
    if not callable(fn):
        raise TypeError("launch calls a function, and %r is none; the command dlrover-run runs programs" % (fn,))
    if not isinstance(args, (tuple, list)):
        raise TypeError("args has to be a tuple, such as args=(%r,)" % (args,))
    options = {key.replace("-", "_"): value for key, value in options.items()}
    for key in ("m", "module", "no_python", "run_path"):
        if options.get(key):
            raise ValueError("%s=%r is for scripts, and launch calls a function" % (key, options[key]))
    with tempfile.TemporaryDirectory(prefix="dlrover-run-") as directory:
        with open(os.path.join(directory, worker.CALL), "wb") as f:
            f.write(packed_call(name, fn, tuple(args)))
        asked, log = words(options), defaults(options, directory)
        begin = os.path.getsize(log) if os.path.exists(log) else 0
        command = words(options) + [os.path.abspath(worker.__file__), directory]
        status = run(command)
        if status == 2:
            raise ValueError("dlrover-run %s is refused, for the reason that it has printed" % " ".join(asked))
        return result(name, status, directory, *history(log, begin))


def elastic_launch(config, entrypoint):
    """Returns a function that launches entrypoint, as torch.distributed.launcher.api.elastic_launch does.

    config is PyTorch's LaunchConfig, entrypoint a function. PyTorch's ChildFailedError is raised when a worker of this
    node has failed.
    """
    def call(*args):
        try:
            return launch(entrypoint, args, **options_of(config))
        except ChildFailedError as e:
            if not e.failures:
                raise
            raise torch_error(e) from e
    return call


def name_of(fn):
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", type(fn).__name__)


def packed_call(name, fn, args):
    """Is the state of this process that a worker needs, and the function with its arguments, pickled in turn."""
    import multiprocessing.spawn
    data = multiprocessing.spawn.get_preparation_data("MainProcess")
    keys = ("sys_path", "sys_argv", "init_main_from_name", "init_main_from_path")
    data = {key: data[key] for key in keys if key in data}
    if not os.path.isfile(data.get("init_main_from_path", "")):
        data.pop("init_main_from_path", None)  # such as <stdin>
    importable = "init_main_from_path" in data or not data.get("init_main_from_name", "__main__").endswith("__main__")
    call = worker.pack("%s, or one of its arguments," % name, (fn, args), look_up_main=importable)
    return pickle.dumps(data, pickle.HIGHEST_PROTOCOL) + call


def defaults(options, directory):
    """Adds options that nobody has given, and returns the path of the event log."""
    def given(key):
        return options.get(key) or os.environ.get("PET_" + key.upper())
    if not any(map(given, ("log_dir", "redirects", "tee"))):
        options["log_dir"] = os.path.join(directory, "logs")  # for workers' error files alone
    if not given("log_format") and not on_console():
        options["log_format"] = "text"
    if not given("event_log"):
        options["event_log"] = os.path.join(directory, "events")
    return given("event_log")


def words(options):
    """Is options as the command line has them."""
    out = []
    for key, value in options.items():
        option = "--" + key.replace("_", "-")
        if isinstance(value, dict):
            value = ",".join("%s=%s" % (k, str(v).lower() if isinstance(v, bool) else v) for k, v in value.items())
        for v in value if isinstance(value, (list, tuple)) else [value]:
            if v is True:
                out.append(option)
            elif v is not None and v is not False:
                out.append("%s=%s" % (option, v))
    return out


# TIED executes a program that gets SIGTERM once the thread that started it has ended, be it by kill -9: not as
# preexec_fn of subprocess, which is not safe beside threads, and a notebook has some.
TIED = """import os, signal, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGTERM))  # PR_SET_PDEATHSIG
except (ImportError, OSError, AttributeError):
    pass  # this Python has no ctypes
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], ["dlrover-run"] + sys.argv[3:])"""


def on_console():
    """Whether sys.stdout and sys.stderr are the descriptors of this process, and not those of a notebook."""
    return sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__


def run(arguments):
    """Runs dlrover-run in a session of its own, which gets the signals that this function sends alone."""
    command = [sys.executable, "-I", "-S", "-c", TIED, str(os.getpid()), dlrover_run.find_program()] + arguments
    pipe = None if on_console() else subprocess.PIPE
    with subprocess.Popen(command, env=dict(os.environ, PYTHON_EXEC=sys.executable), stdin=subprocess.DEVNULL,
                          stdout=pipe, stderr=pipe, start_new_session=True) as job:
        relay = Relay({job.stdout: sys.stdout, job.stderr: sys.stderr} if pipe else {})
        try:
            relay.run()
            return job.wait()
        except BaseException as e:
            stop(job, relay, signal.SIGINT if isinstance(e, KeyboardInterrupt) else signal.SIGTERM)
            raise


def stop(job, relay, sig):
    """Ends a job. Its workers have --shutdown-timeout to end; another Ctrl-C ends that time."""
    while job.poll() is None:
        try:
            job.send_signal(sig)
            relay.run()
            job.wait()
        except KeyboardInterrupt:
            pass


class Relay:
    """Passes the output of pipes on to files of Python, such as that of a notebook's cell."""

    def __init__(self, streams):
        self.selector = selectors.DefaultSelector()
        for pipe, to in streams.items():
            self.selector.register(pipe, selectors.EVENT_READ, (to, codecs.getincrementaldecoder("utf-8")("replace")))

    def run(self):
        """Returns when all pipes have ended. It can be interrupted, and called again."""
        while self.selector.get_map():
            for key, _ in self.selector.select():
                to, decoder = key.data
                data = os.read(key.fd, 1 << 16)
                if not data:
                    self.selector.unregister(key.fileobj)
                try:
                    to.write(decoder.decode(data, final=not data))
                    to.flush()
                except (OSError, ValueError):
                    pass  # output that nobody can see does not end a training


def history(path, begin):
    """Reads an event log from an offset: the last start of the workers, how they ended since, and the end."""
    start, exits, end = {"pids": []}, [], {"reason": "dlrover-run was killed", "verdict": ""}
    if not os.path.exists(path):
        return start, exits, end
    with open(path, "rb") as f:
        f.seek(begin)
        for line in f:
            if not line.endswith(b"\n"):
                break  # dlrover-run was killed while it wrote
            event = json.loads(line)
            if event["event"] == "start":
                start, exits = event, []
            elif event["event"] == "worker-exit":
                exits.append(event)
            elif event["event"] == "end":
                end = event
    return start, exits, end


def result(name, status, directory, start, exits, end):
    """Returns the results of the workers by rank, or raises ChildFailedError."""
    if status != 0:
        failures = [failure(e, outcome(directory, e["pid"])) for e in exits]
        failures = sorted(filter(None, failures), key=lambda f: f.timestamp)
        raise ChildFailedError(name, status, end["verdict"] or end["reason"], {f.rank: f for f in failures})
    values = {}
    for e in sorted(exits, key=lambda e: e["rank"]):
        found = outcome(directory, e["pid"])
        if "unsendable" in found:
            raise worker.Unsendable(found["unsendable"])
        if "value" in found:
            values[e["rank"]] = found["value"]
    return values


def outcome(directory, pid):
    try:
        with open(os.path.join(directory, str(pid)), "rb") as f:
            return pickle.load(f)
    except FileNotFoundError:
        return {}


def failure(event, found):
    """Is a worker's Failure; None: it has not failed. One that was stopped can have raised an exception before."""
    code = event["exit_code"]
    if "message" not in found and (code == 0 or event["stopped"]):
        return None
    message = found.get("message") or ("signal %d" % -code if code < 0 else "exit status %d" % code)
    return Failure(event["rank"], event["local_rank"], event["pid"], code, found.get("time") or moment(event["time"]),
                   message, found.get("traceback", ""))


def moment(text):
    """Is a time of the event log in seconds since 1970."""
    second, fraction, zone = re.match(r"(.{19})(\.\d+)?(.+)", text).groups()
    return datetime.strptime(second + zone, "%Y-%m-%dT%H:%M:%S%z").timestamp() + float(fraction or 0)


def options_of(config):
    """Is PyTorch's LaunchConfig, of any version, as options."""
    options = dict(vars(config))
    for key in ("metrics_cfg", "log_line_prefix_template"):
        if options.pop(key, None):
            raise ValueError("LaunchConfig.%s: dlrover-run has nothing like it; leave it out" % key)
    options.pop("rdzv_timeout", None)  # is in rdzv_configs as well
    conf = dict(options.pop("rdzv_configs"))
    specs, numa = options.pop("logs_specs", None), options.pop("numa_options", None)
    options.update(nnodes="%d:%d" % (options.pop("min_nodes"), options.pop("max_nodes")),
                   rdzv_id=options.pop("run_id"), node_rank=conf.pop("rank", None), rdzv_conf=conf)
    if specs is not None:
        options.update(log_dir=specs._root_log_dir, redirects=specs._redirects, tee=specs._tee,
                       local_ranks_filter=",".join(map(str, specs._local_ranks_filter or ())))
    if numa is not None:
        options["numa_binding"] = numa.affinity_mode.value
    for key in ("redirects", "tee"):
        std = options[key]
        options[key] = ",".join("%d:%d" % i for i in std.items()) if isinstance(std, dict) else int(std)
    return {key: value for key, value in options.items() if value not in ("", None, 0, {}, []) or key == "max_restarts"}


def torch_error(error):
    from torch.distributed.elastic.multiprocessing import errors
    failures = {}
    for f in error.failures.values():
        p = failures[f.rank] = errors.ProcessFailure(f.local_rank, f.pid, f.exitcode, error_file="<N/A>")
        p.timestamp = int(f.timestamp)
        if f.traceback:
            p.message = {"message": f.message, "extraInfo": {"py_callstack": f.traceback, "timestamp": p.timestamp}}
    return errors.ChildFailedError(error.name, failures)
