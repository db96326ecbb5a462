# Stores and groups by files in FAKE_DIR.
import os
import time

import torch

DIR = os.environ.get("FAKE_DIR", "")


class ReduceOp:
    MAX = "max"


def is_available():
    return True


def is_nccl_available():
    return True


class TCPStore:
    def __init__(self, host, port, is_master, timeout, wait_for_workers):
        torch.fault("store")
        self.timeout = timeout.total_seconds()

    def set(self, key, value):
        path = os.path.join(DIR, key.replace("/", "_"))
        with open(path + ".new", "w") as f:
            f.write(value)
        os.rename(path + ".new", path)

    def get(self, key):
        end = time.monotonic() + self.timeout
        while time.monotonic() < end:
            try:
                with open(os.path.join(DIR, key.replace("/", "_")), "rb") as f:
                    return f.read()
            except FileNotFoundError:
                time.sleep(0.001)
        raise RuntimeError("wait timeout after %d ms, keys: /%s" % (1000 * self.timeout, key))


class PrefixStore:
    def __init__(self, prefix, store):
        self.prefix, self.store = prefix, store

    def set(self, key, value):
        self.store.set(self.prefix + "/" + key, value)

    def get(self, key):
        return self.store.get(self.prefix + "/" + key)


def init_process_group(backend, store, rank, world_size, timeout):
    torch.fault("join")
    debug = os.environ.get("NCCL_DEBUG_FILE")
    if debug:
        with open(debug, "w") as f:
            f.write("host:1:1 [0] NCCL INFO NCCL version 2.27\nhost:1:1 [0] NCCL INFO Using network IB\n")
            f.write("host:1:1 more\n")
    store.set("rank/%d" % rank, "%s %d" % (backend, world_size))
    for i in range(world_size):
        store.get("rank/%d" % i)


def all_reduce(data, op):
    torch.fault("allreduce")
    time.sleep(0.001)


def destroy_process_group():
    torch.fault("destroy")
