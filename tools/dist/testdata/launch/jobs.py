"""Functions as jobs with PyTorch: a collective, and the arguments and exceptions of PyTorch's own elastic_launch."""
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig

from dlrover_run import elastic_launch, launch


def all_reduce(tensor):
    dist.init_process_group("gloo")
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor


def double(n):
    if n == 13:
        raise ValueError("an unlucky number")
    return 2 * n + int(os.environ["RANK"])


def drop_in():
    for rendezvous in ({"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"},
                       {"rdzv_backend": "static", "rdzv_endpoint": "localhost:0", "rdzv_configs": {"rank": 0}}):
        config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="same", max_restarts=0, **rendezvous)
        assert elastic_launch(config, double)(4) == {0: 8, 1: 9}
    try:
        elastic_launch(config, double)(13)
        raise AssertionError
    except ChildFailedError as e:  # PyTorch's
        assert "ValueError: an unlucky number" in str(e), e
        assert e.get_first_failure()[1].exitcode in (1, -15), e


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for t in launch(all_reduce, (torch.ones(3),), nproc_per_node=2).values():
        assert t.tolist() == [2, 2, 2], t
    drop_in()
    print("as PyTorch has it, with", torch.__version__, sys.version.split()[0])
