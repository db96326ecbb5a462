import argparse

import deepspeed
import torch
import torch.distributed as dist

import told

parser = argparse.ArgumentParser()
parser.add_argument("log")
parser.add_argument("--zero", type=int, default=1)
parser.add_argument("--local_rank", type=int)  # the deepspeed command gives it
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
engine, optimizer, _, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=told.RATE),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": args.zero},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # 1.0 is the default
    },
)
one, target = torch.ones(1, 1), torch.full((1, 1), rank + 1.0)
number, stop = 0, 0
while not stop:
    loss = ((engine(one) - target) ** 2 / 2).sum()
    engine.backward(loss)
    engine.step()
    sums = torch.tensor([rank + 1, told.wanted()])
    dist.all_reduce(sums)
    total, stop = sums.tolist()
    number += 1
    with torch.no_grad():
        w = engine(one)
    told.step(rank, world, number, w, total)
dist.destroy_process_group()
