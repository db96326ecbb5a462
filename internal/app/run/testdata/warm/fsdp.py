import facts

facts.begin()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402

facts.late()
dist.init_process_group("gloo")
for kind in "fully_shard", "FSDP":
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    if kind == "FSDP":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (facts.WORLD,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(facts.STEPS):
        x = facts.batch(step)
        out = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        out.backward()
        optimizer.step()
        facts.loss(out.item())
dist.barrier()
dist.destroy_process_group()
facts.end()
