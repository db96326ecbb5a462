"""Starts one of PyTorch's own servers for each line of standard input and prints its port."""
import sys
from datetime import timedelta

from torch.distributed import TCPStore

stores = []
for _ in sys.stdin:
    stores.append(TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False))
    print(stores[-1].port, flush=True)
