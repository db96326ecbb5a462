"""What the installed PyTorch's torchrun makes of a command line or a value.

Reads one JSON request a line on stdin and answers each with one line of JSON, after a first line with the versions:
  {"argv": [...], "env": {...}}    -> {"kind": "ok"|"error"|"exit", "values": {...}, "message": "..."}
  {"call": "endpoint", "arg": ...} -> {"kind": "ok"|"error", "value": ..., "message": "..."}
Values are strings; null for None and lists for lists.
"""

import json
import logging
import os
import platform
import string
import sys

import torch
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.rendezvous import utils

logging.disable(logging.CRITICAL)


class Refused(Exception):
    pass


class Exited(Exception):
    pass


def refuse(message):
    raise Refused(message)


def leave(*_):
    raise Exited()


def text(v):
    if isinstance(v, list):
        return [text(x) for x in v]
    if isinstance(v, bool):
        return "true" if v else "false"
    return v if v is None else str(v)


def parse(argv, env):
    for name in [n for n in os.environ if n.startswith("PET_")]:
        del os.environ[name]
    os.environ.update(env)
    parser = run.get_args_parser()
    parser.error, parser.exit, parser.print_help = refuse, leave, lambda *_: None
    return {"values": {k: text(v) for k, v in vars(parser.parse_args(argv)).items()}}


CALLS = {
    "nnodes": lambda s: list(run.parse_min_max_nnodes(s)),
    "conf": utils._parse_rendezvous_config,
    "endpoint": lambda s: list(utils.parse_rendezvous_endpoint(s, 29400)),
    "std": lambda s: {str(k): int(v) for k, v in Std.from_str(s).items()} if ":" in s else int(Std.from_str(s)),
    "substitute": lambda s: string.Template(s).safe_substitute(local_rank=7),
    "int": lambda s: str(int(s)),
    "float": lambda s: str(float(s)),
    "repr": repr,
}


def answer(request):
    try:
        if "call" in request:
            out = {"value": CALLS[request["call"]](request.get("arg", ""))}
        else:
            out = parse(request.get("argv", []), request.get("env", {}))
        return {"kind": "ok", **out}
    except Exited:
        return {"kind": "exit"}
    except Exception as e:
        return {"kind": "error", "message": str(e)}


print(json.dumps({"torch": torch.__version__.split("+")[0], "python": platform.python_version()}), flush=True)
for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))))
