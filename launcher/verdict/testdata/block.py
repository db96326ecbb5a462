"""Prints torch's own ChildFailedError texts, as a JSON object, for the cases on standard input."""
import json
import os
import socket
import sys
import tempfile

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

socket.getfqdn = lambda name="": "host-a.example.com"


def process_failure(f):
    path = os.path.join(tempfile.mkdtemp(), "error.json")
    if not f["file"]:
        p = ProcessFailure(f["local_rank"], f["pid"], f["exit_code"], path)
        p.timestamp = f["time"]
        return p
    with open(path, "w") as out:
        out.write(f["file"])
    p = ProcessFailure(f["local_rank"], f["pid"], f["exit_code"], path)
    p.error_file = f["error_file"]
    return p


def block(case):
    return str(ChildFailedError(case["entrypoint"], {f["rank"]: process_failure(f) for f in case["failures"]}))


json.dump({name: block(case) for name, case in json.load(sys.stdin).items()}, sys.stdout)
