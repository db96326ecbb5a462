"""Warm workers: an interpreter that has imported what a job needs is forked, and the fork becomes a worker.

The parent is started as a worker is, with the same options of the interpreter, but with parent.py as the script. It
never runs that: sitecustomize installs a path hook, which the interpreter asks for an importer of its script when all
is set up and before anything has run. The hook serves the launcher (serve.py) over descriptor 0; it returns only in a
fork that the launcher has told to become a worker. Its interpreter then believes that the script is a directory, asks
the module runpy for a function, and is given the C function that runs the real script (start.py). So no Python frame
is below the script, and exceptions, tracebacks, exit codes and the end of the interpreter are the interpreter's own.
Where our sitecustomize does not run, parent.py does, and says so: a job's script cannot be started by accident.

What is as in a fresh process, as tests compare it with Python 3.8 to 3.14: sys.argv, orig_argv, path, flags, modules
of __main__, streams, signals, working directory, environment (in Python, in C, and in /proc), session, parent
process, random numbers, threads of OpenMP and OpenBLAS, atexit, threads, multiprocessing, pickles, sources. What is
not:

- All forks of a parent have the same hash seed, unless PYTHONHASHSEED is set, and the same addresses.
- sys.modules has what is imported already. A script in whose directory a file hides one of these modules is refused,
  and so is one with relative names in PYTHONPATH in another working directory.
- What imports print is lost. Variables, signal handlers and descriptors are as imports leave them; a variable that an
  import has changed keeps the worker's value if that is not what it was for the import.
- What exists at the fork stays out of collections of garbage until the exit (gc.freeze), and is not in
  gc.get_objects(): else the first full collection would copy most of the parent's memory. So does the garbage of
  imports, 1 % of what they leave.
- ctypes is imported, of which a newer libffi keeps its own file open, and faulthandler of 3.14 shows that it has
  called the script.
- With Python up to 3.11 recursion may be two calls less deep, for they count C functions. With -c and 3.13 a
  KeyboardInterrupt ends with code 1, not by a signal. Forks of 3.8 with -X dev crash when they end: those are unsafe.
- Where the kernel cannot be told where the command line and the environment are (PR_SET_MM_MAP needs
  CONFIG_CHECKPOINT_RESTORE), /proc shows as much of them as fits where the parent's were.

A parent that has threads, processes or an accelerator after its imports says so and is not used. Neither is one of
which a module has read what is of a worker: $RANK, or what only running the script tells (serve.py). Such reads are
seen in os.environ, not in C. It has no thread of OpenBLAS, for it is imported with OPENBLAS_NUM_THREADS=1; forks get
theirs when they become workers. A fork of it has to multiply, go backward and load a batch first (check.py). Forks that
workers wait for are made meanwhile; if that fails, they end without having been workers. Its priority is the lowest
while it imports, if it may go back to its own later, which takes CAP_SYS_NICE or RLIMIT_NICE, else SCHED_BATCH
(pace.py).

learn.py writes what a worker has imported by its first step; script.py reads what a script is going to import.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PARENT = os.path.join(HERE, "parent.py")


def install(known=()):
    """Called by sitecustomize where DLROVER_WARM is set, and in a fork that becomes a worker. In an interpreter that
    is started as a parent it waits for the launcher in place of a script; elsewhere the variable names the file that
    is to tell what this process imports, and is gone then: it does not concern the processes that this one starts.
    known: modules that it need not tell of."""
    if getattr(sys, "argv", [""])[0] == PARENT:
        sys.path_hooks.insert(0, _instead_of_the_script)
        return
    path = os.environ.pop("DLROVER_WARM", "")
    if os.path.isabs(path):
        from . import learn

        learn.start(path, known)


def _instead_of_the_script(path):
    """The interpreter asks for an importer of the script, when all is set up and before anything of the script has
    run. There are no Python frames below this one: the script of a fork has none below it, as if it had been
    started."""
    if path != PARENT:
        raise ImportError
    sys.path_hooks.remove(_instead_of_the_script)
    from . import serve

    return serve.run()
