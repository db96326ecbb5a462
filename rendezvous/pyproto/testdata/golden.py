"""Messages of DLRover's own packages, for the tests of pyproto. Run it with a Python that has the package dlrover.

golden.py write VERSION > golden/VERSION.json
    One JSON array: every dataclass of messages that this version has, with its defaults and with values, as
    {"class": name, "content": see plain, "pickles": {protocol: hex}}. Protocol 4 is what these versions write; the
    first of every class has the others too, but 2 where there are bytes, which it has not. VERSION 0.3.8 has what
    0.4.0 has no longer; run it with 0.4.0.
golden.py read
    Reads pickles in hex from the standard input, one a line, as this version's master does, and answers each with a
    line of JSON: its content, or {"error": text}.
golden.py big
    Prints pickles in hex that are too long for a file: more than one frame, and a world of 10,000 nodes.
golden.py refused
    Prints pickles in hex of values that no message has, and that are to be refused.
"""

import collections
import dataclasses
import enum
import json
import pickle
import sys
import typing

try:
    from dlrover.python.common import comm
except ImportError:
    from dlrover.python.common import grpc as comm

try:
    from dlrover.python.util.dlrover_pickle import loads
except ImportError:
    from pickle import loads


def plain(v):
    """The content of a value as JSON: what JSON has as it is, anything else as an object with one key."""
    if v is None or isinstance(v, (bool, str)):
        return v
    if isinstance(v, int):
        return {"int": str(v)}
    if isinstance(v, float):
        return {"float": v.hex()}
    if isinstance(v, bytes):
        return {"bytes": v.hex()}
    if isinstance(v, list):
        return {"list": [plain(x) for x in v]}
    if isinstance(v, tuple):
        return {"tuple": [plain(x) for x in v]}
    if isinstance(v, dict):
        return {"dict": [[plain(k), plain(x)] for k, x in v.items()]}
    cls = type(v)
    return {"object": [cls.__module__, cls.__qualname__, plain(v.__dict__)]}


def values(cls, salt):
    """Values for the fields of a dataclass by their types, every one different."""
    out = {}
    for i, (name, hint) in enumerate(typing.get_type_hints(cls).items()):
        out[name] = value(hint, salt + i)
    return out


def value(hint, n):
    args = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is list:
        return [value(args[0], n + i) for i in range(3)]
    if origin is dict:
        return {value(args[0], n + i): value(args[1], n + i) for i in (2, 0, 1)}
    if dataclasses.is_dataclass(hint):
        return hint(**values(hint, n + 1))
    ints = [0, 1, -1, 255, 256, 65535, 65536, 2**31 - 1, -2**31, 2**31, 2**40, 2**63 - 1, -2**63, -2**47]
    return {
        int: ints[n % len(ints)],
        float: [0.0, 1.5, -2.25, 1e300][n % 4],
        bool: n % 2 == 0,
        str: ["text %d" % n, "", "größe 大 \U0001f600 %d" % n][n % 3],
        bytes: bytes(range(n % 7)) * 50,
    }[hint]


def samples(version):
    module = comm
    if version == "0.3.8":
        yield from old()
        return
    for name in sorted(vars(module)):
        cls = getattr(module, name)
        if isinstance(cls, type) and dataclasses.is_dataclass(cls):
            yield cls()
            for salt in (0, 5):
                v = values(cls, salt)
                if v:
                    yield cls(**v)
    world = {3: 8, 0: 8, 2: 4, 1: 8}
    yield comm.RendezvousState(world=world, round=7)
    yield comm.RendezvousState(world={0: 8}, waiting_num=-1)
    yield comm.KeyValuePair("k", b"v")
    yield comm.KeyValuePair("exit/num_members", 1)
    yield comm.KeyValuePair("text", "a value that is text")
    yield comm.KeyValuePair("long", bytes(300))
    yield comm.NodeEvent("WAIT_PRE_CHECK", {"reason": "none", "n": 1, "nested": [{"a": None}, (1, 2, 3), ()]})
    yield comm.HeartbeatResponse(comm.DiagnosisAction("NoAction", "{}"))
    yield comm.RunningNodes([comm.NodeMeta(type="worker", id=i, rank=i) for i in range(3)])
    yield comm.HeartBeat(timestamp=1700000000)


def old():
    """Classes that were in the module to 0.3.8."""

    def make(name, fields):
        cls = dataclasses.make_dataclass(name, fields, bases=(comm.Message,))
        cls.__module__ = comm.__name__
        setattr(comm, name, cls)
        return cls

    status = make("NetworkStatus", [("rank", int, 0), ("status", str, ""), ("elasped_time", float, 0.0)])
    yield status()
    yield status(1, "succeeded", 12.5)
    event = make("NodeEvent", [("event_type", str, ""), ("message", str, ""), ("node", object, None)])
    yield event("Deleted", "OOM", comm.NodeMeta(type="worker", id=1))
    join = make("JoinRendezvousRequest", [
        ("node_id", int, 0), ("local_world_size", int, 0), ("rdzv_name", str, ""), ("node_ip", str, ""),
    ])
    yield join(1, 8, "elastic-training", "10.0.0.1")
    for name in "DiagnosisTrainingLog", "DiagnosisCudaLog", "DiagnosisChipMetrics":
        yield make(name, [("timestamp", int, 0)])(1700000000)


def pickles(message, protocols):
    for protocol in protocols:
        data = pickle.dumps(message, protocol)
        if protocol > 2 or b"_codecs" not in data and b"__builtin__" not in data:
            yield str(protocol), data.hex()


def write(version):
    out, seen = [], set()
    for m in samples(version):
        name = type(m).__name__
        protocols = (4,) if name in seen else (2, 3, 4, 5)
        seen.add(name)
        out.append({"class": name, "content": plain(m), "pickles": dict(pickles(m, protocols))})
    print("[\n" + ",\n".join(json.dumps(x) for x in out) + "\n]")


def read():
    for line in sys.stdin:
        try:
            answer = plain(loads(bytes.fromhex(line)))
        except Exception as e:
            answer = {"error": repr(e)}
        print(json.dumps(answer), flush=True)


def big():
    for m in (
        comm.KeyValuePair("k", bytes(range(256)) * 4096),
        comm.KeyValuePair("x" * 100000, "ä" * 100000),
        comm.RendezvousState(world={i: 8 for i in reversed(range(10000))}),
        comm.RunningNodes([comm.NodeMeta(type="worker", addr="10.0.0.%d" % i, id=i, rank=i) for i in range(3000)]),
    ):
        for protocol in 3, 4, 5:
            print(pickle.dumps(m, protocol).hex())


class Color(enum.Enum):
    RED = 1


def refused():
    shared = [1]
    loop = []
    loop.append(loop)
    for v in (
        comm.KeyValuePair("k", 2**63), comm.KeyValuePair("k", -2**63 - 1), comm.KeyValuePair("k", 2**3000),
        comm.KeyValuePair("k", {1, 2}), comm.KeyValuePair("k", bytearray(b"x")), comm.KeyValuePair("k", 1j),
        comm.KeyValuePair("k", Color.RED), comm.KeyValuePair("k", shared and [shared, shared]),
        comm.KeyValuePair("k", loop), comm.KeyValuePair("k", eval), comm.KeyValuePair("k", comm.KeyValuePair),
        comm.KeyValuePair("k", collections.OrderedDict(a=1)), comm.KeyValuePair("k", {(1, 2): 3}),
        comm.KeyValuePair("k", {b"a": 3}), comm.KeyValuePair("k", comm.RendezvousState.__init__),
    ):
        for protocol in 2, 3, 4, 5:
            print(pickle.dumps(v, protocol).hex())


if __name__ == "__main__":
    {"write": write, "read": read, "big": big, "refused": refused}[sys.argv[1]](*sys.argv[2:])
