"""torch.multiprocessing.spawn, multiprocessing's three methods, and loaders with each."""
import multiprocessing

import facts

if __name__ == "__main__":
    facts.begin()

import torch  # noqa: E402
import torch.multiprocessing  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402


class Batches(Dataset):
    def __len__(self):
        return facts.STEPS

    def __getitem__(self, i):
        return facts.batch(i)


def work(i, queue):
    queue.put([i, __name__, Batches.__module__, float(torch.ones(4).sum())])


def start(method):
    queue = torch.multiprocessing.get_context(method).SimpleQueue()
    process = torch.multiprocessing.get_context(method).Process(target=work, args=(7, queue))
    process.start()
    got = queue.get()
    process.join()
    return [got, process.exitcode]


def main():
    facts.late()
    facts.same("default", multiprocessing.get_start_method(allow_none=True))
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(work, (queue,), nprocs=1)
    facts.same("spawn", sorted(queue.get() for _ in range(1)))
    for method in "fork", "spawn", "forkserver":
        facts.same("process by " + method, start(method))
        loader = DataLoader(Batches(), batch_size=None, num_workers=1, multiprocessing_context=method)
        batches = list(loader)
        facts.same("loader by " + method, [float(b.sum()).hex() for b in batches])
    facts.ddp(batches)
    facts.end()


if __name__ == "__main__":
    main()
