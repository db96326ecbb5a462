"""Uses every operation of PyTorch's TCPStore client on the server at argv[1:3]."""
import sys
import threading
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, TCPStore

host, port = sys.argv[1], int(sys.argv[2])
SECOND = timedelta(seconds=1)
SHORT = timedelta(milliseconds=100)


def connect(**options):
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30), **options)


def fails(call, *args):
    try:
        call(*args)
    except Exception as e:
        return str(e)
    raise AssertionError("%s%r succeeded" % (call, args))


def expect(got, want):
    assert got == want, "got %r, want %r" % (got, want)


def basic(store, other):
    store.set("k", "v")
    expect(other.get("k"), b"v")
    store.set("empty", "")
    expect(other.get("empty"), b"")
    big = "x" * (64 << 20)  # as much as a value may have
    store.set("big", big)
    expect(other.get("big"), big.encode())
    expect([store.add("n", d) for d in (1, 5, -10)], [1, 6, -4])
    expect(other.get("n"), b"-4")
    expect(store.compare_set("cas", "", "one"), b"one")
    expect(store.compare_set("cas", "two", "three"), b"one")
    expect(store.compare_set("cas", "one", "two"), b"two")
    expect(store.compare_set("absent", "x", "y"), b"x")
    keys = store.num_keys()
    expect(store.delete_key("k"), True)
    expect(store.delete_key("k"), False)
    expect(store.num_keys(), keys - 1)
    outer = PrefixStore("a", PrefixStore("b", store))
    outer.set("k", "prefixed")
    expect(other.get("b/a/k"), b"prefixed")


def waiting(store, other):
    store.wait(["n", "big"], SECOND)
    for i in range(3):
        fails(store.wait, ["late%d" % i], SHORT)
        # The server must drop that wait: an answer to it would put the stream out of step. Releases before 2.1 do not
        # say that they gave up, so the server learns it from the next request.
        if not hasattr(store, "append"):
            store.num_keys()
        other.set("late%d" % i, "now")
        expect(other.get("late%d" % i), b"now")
        expect(store.add("n", 1), -3 + i)
    short = connect()
    short.set_timeout(SHORT)
    fails(short.get, "never")
    expect(short.add("n", 0), -1)
    done = []
    thread = threading.Thread(target=lambda: done.append(other.get("soon")))
    thread.start()
    store.set("soon", "here")
    thread.join()
    expect(done, [b"here"])


def extended(store, other):
    expect(store.has_extended_api(), True)
    store.append("app", "one,")
    store.num_keys()  # a write has no answer: another connection may be faster unless this one has asked something
    other.append("app", "two")
    other.num_keys()
    expect(store.get("app"), b"one,two")
    store.multi_set(["m1", "m2"], ["1", "22"])
    expect(other.multi_get(["m2", "m1"]), [b"22", b"1"])
    expect(store.check(["m1", "m2"]), True)
    expect(store.check(["m1", "none"]), False)
    expect(other.clone().get("m1"), b"1")


def queues(store, other):
    expect(store.queue_len("q"), 0)
    for v in ("a", "b"):
        store.queue_push("q", v)
    expect(store.queue_len("q"), 2)
    expect([other.queue_pop("q"), other.queue_pop("q")], [b"a", b"b"])
    fails(store.queue_pop, "q", False)
    store.queue_push("q", "c")
    store.num_keys()
    expect(other.queue_pop("q", False), b"c")
    short = store.clone()
    short.set_timeout(SHORT)
    assert "timeout" in fails(short.queue_pop, "q")
    expect(short.queue_len("q"), 0)


def newest(store, other):
    mine = set(store.list_keys())
    assert {"n", "big", "m1"} <= mine and "q" not in mine, mine


def barrier(store, other):
    store.barrier("bar1", 1, SECOND)
    assert "timeout" in fails(store.barrier, "bar2", 2, SHORT)
    other.barrier("bar2", 2, SECOND)
    expect(store.get("bar2"), b"2")


def main():
    store, other = connect(), connect()
    basic(store, other)
    waiting(store, other)
    ran = ["basic", "waiting"]
    for part, needs in (extended, "append"), (queues, "queue_push"), (newest, "list_keys"), (barrier, "barrier"):
        if hasattr(store, needs):
            part(store, other)
            ran.append(part.__name__)
    if hasattr(store, "append"):
        for flavour in (True, False):  # of the server: it must not matter to a client
            expect(connect(use_libuv=flavour).get("n"), store.get("n"))
    # A client that knows the world size counts itself, and does not wait.
    for n in 1, 2:
        connect(world_size=2)
    print("torch", torch.__version__, "ran", *ran)


main()
