"""A guard of __main__, asyncio, threads of its own, os.fork, and children of it."""
import asyncio
import os
import subprocess
import sys
import threading

import facts

if __name__ == "__main__":
    facts.begin()

import torch  # noqa: E402


async def wait():
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0.01)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(6 * 7)", stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    return [out.decode(), await loop.run_in_executor(None, sum, [1, 2]), type(loop).__name__]


def forked():
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(w, torch.ones(300, 300).mm(torch.ones(300, 300)).sum().item().hex().encode())
        os._exit(3)
    os.close(w)
    return [os.read(r, 100).decode(), os.waitpid(pid, 0)[1]]


class Model(torch.nn.Module):
    pass


if __name__ == "__main__":
    facts.late()
    facts.same("asyncio", asyncio.run(wait()))
    facts.same("fork", forked())
    thread = threading.Thread(target=lambda: facts.same("thread", Model.__module__))
    thread.start()
    thread.join()
    facts.ddp()
    facts.end()
