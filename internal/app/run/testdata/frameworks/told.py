"""What the training scripts of this folder have in common: their arguments, and what they tell the test.

Each trains one number w towards the mean of rank+1 over all ranks, by SGD with a rate of 0.1, from 0: if the framework
averages the gradients of all ranks, w after step s is (N+1)/2 * (1 - 0.9**s). They do so until LOG.stop exists;
LOG.exitRANK lets one of them fail, with what is in that file as its last words; LOG.memoryRANK lets it take all memory.
"""

import os
import sys
import time

RATE = 0.1
# Launchers may put arguments of their own before or behind ours.
LOG = next(arg for arg in sys.argv[1:] if not arg.startswith("-"))


def step(rank, world, number, w, total):
    """Appends a line: w after step number, and the sum of rank+1 over all ranks."""
    with open(LOG, "a") as log:
        log.write(f"{rank} {world} {os.getpid()} {number} {float(w):.6f} {float(total):g}\n")
    time.sleep(0.05)
    if os.path.exists(f"{LOG}.exit{rank}"):
        with open(f"{LOG}.exit{rank}") as words:
            print(words.read(), end="", file=sys.stderr, flush=True)
        os.remove(f"{LOG}.exit{rank}")
        os._exit(9)  # sys.exit would let some frameworks wait for the others first: JAX for 300 s
    taken = []
    while os.path.exists(f"{LOG}.memory{rank}"):
        taken.append(b"x" * (1 << 24))


def wanted():
    """1 if the test wants the job to end. All ranks must agree on that: some may see the file later."""
    return int(os.path.exists(LOG + ".stop"))
