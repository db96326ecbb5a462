"""The distribution dlrover-run-go: where its programs are, whose the name dlrover-run is, and functions as jobs."""
import importlib.metadata
import os
import shutil

from dlrover_run.functions import ChildFailedError, Failure, elastic_launch, launch
from dlrover_run.worker import Unsendable

__all__ = ["ChildFailedError", "Failure", "Unsendable", "elastic_launch", "find_program", "launch"]

DISTRIBUTION = "dlrover-run-go"
RESTORE = "pip install --force-reinstall --no-deps dlrover_run_go-*.whl"


def find_program(name="dlrover-run"):
    """Returns the path of a program of this distribution.

    FileNotFoundError: it has been removed, or another distribution has replaced it.
    """
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for path in (os.path.normpath(f.locate()) for f in files if f.name == name):
        if is_program(path):
            return path
        raise FileNotFoundError("%s %s: %s puts the one of %s back" % (
            path, "is the script of another package" if os.path.exists(path) else "is missing", RESTORE, DISTRIBUTION))
    path = shutil.which(name)
    if path and is_program(path):
        return path
    raise FileNotFoundError("%s is not installed: install the wheel of %s" % (name, DISTRIBUTION))


def is_program(path):
    """Whether a file is a program of ours, and not a script in Python of the same name."""
    try:
        with open(path, "rb") as f:
            return f.read(4) == b"\x7fELF"
    except OSError:
        return False
