"""Many threads, each blocked in Python code of another shape. Prints what traceback says of them, and blocks."""
import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
import traceback

gate = threading.Lock()
gate.acquire()


def block(*_):
    gate.acquire()


def recursion(n=40):
    if n:
        return recursion(n - 1)
    block()


def deep():
    recursion(600)


def generators():
    def inner():
        yield 1
        block()

    def outer():
        yield from inner()

    return [x for x in outer() if x]


def comprehensions():
    return {k: [
        block()
        for _ in "a"
    ] for k in (1, 2)}


def genexpr():
    return sum(
        block() or 0
        for _ in range(3)
    )


def class_body():
    class Outer:
        x = 1

        class Inner:
            y = [2]
            block()


def coroutines():
    async def leaf():
        block()

    async def middle():
        await leaf()

    async def main():
        async with contextlib.AsyncExitStack():
            await middle()

    asyncio.run(main())


def callbacks():
    return sorted(
        ["b", "a"],
        key=functools.partial(
            block,
            1,
        ),
    )


class Property:
    @property
    def slow(self):
        try:
            raise KeyError
        except KeyError:
            with contextlib.suppress(ValueError):
                return block()
        finally:
            pass

    def __getitem__(self, key):
        return (
            self
            .slow
        )


def descriptors():
    Property()[
        "x"
    ]


def lambdas():
    (lambda f: (
        lambda: f()
    )())(block)


def gaps():
    """Lines far apart, ahead and back, and a name that is not ASCII."""
    lines = ["def größe(f):", "  x = 1"]
    lines += [""] * 3000
    lines += ["  for x in (1,", *[""] * 400, "    2): x += (", *[""] * 200, "     f()", "   )", "größe(f)"]
    exec(compile("\n".join(lines), "<erzeugt-日本>", "exec"), {"f": block})


def wide():
    """A function with instructions of more than 64 KiB, and a name beyond the BMP."""
    lines = ["def 𝒳(f):"] + ["  a = [%s]" % ", ".join(map(str, range(i, i + 40))) for i in range(900)]
    lines += ["  return f(", "     a)", "𝒳(f)"]
    exec(compile("\n".join(lines), "latin-é", "exec"), {"f": block})


def imports():
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "blocks.py")
        with open(path, "w") as f:
            f.write("import threading\n\n\ndef at_import(f):\n    f()\n\n\nat_import(hook)\n")
        spec = importlib.util.spec_from_file_location("blocks", path)
        m = importlib.util.module_from_spec(spec)
        m.hook = block
        spec.loader.exec_module(m)


def traced():
    sys.settrace(lambda *_: sys.gettrace())
    [
        block(),
    ]


def decorated():
    def deco(f):
        @functools.wraps(f)
        def wrapper(*a):
            return f(*a)
        return wrapper

    @deco
    @functools.lru_cache(None)
    @deco
    def target(a,
               b=2):
        del a, b
        block()

    target(1)


def finalizer():
    class Last:
        def __del__(self):
            block()

    x = Last()
    del x


def closures():
    a, b = 1, 2

    def inner(f):
        nonlocal a
        a += b
        return f(a)

    inner(
        block)


shapes = [recursion, deep, generators, comprehensions, genexpr, class_body, coroutines, callbacks, descriptors, lambdas,
          gaps, wide, imports, traced, decorated, finalizer, closures]


def dump():
    """Frames by thread, the innermost first, as soon as they do not change any more."""
    last = None
    while True:
        frames = sys._current_frames()
        now = {}
        for t in threading.enumerate():
            if t is not threading.current_thread():
                stack = traceback.extract_stack(frames[t.ident])
                now[t.native_id] = [[f.name, f.filename, f.lineno or 0] for f in reversed(stack)]
        if now == last and all(s[0][0] == "block" for s in now.values()):
            return now
        last = now
        time.sleep(0.1)


def report():
    os.write(1, (json.dumps(dump()) + "\n").encode())
    block()


sys.setrecursionlimit(5000)
threading.stack_size(16 << 20)
for shape in shapes:
    threading.Thread(target=shape, name=shape.__name__, daemon=True).start()
threading.Thread(target=report, daemon=True).start()
block()
