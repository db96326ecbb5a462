import facts

facts.begin()

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

facts.late()
deepspeed.init_distributed("gloo")
torch.manual_seed(4)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
engine, _, _, _ = deepspeed.initialize(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    config={"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True})
for step in range(facts.STEPS):
    x = facts.batch(step)
    out = (engine(x) - x.sum(1, keepdim=True)).square().mean()
    engine.backward(out)
    engine.step()
    facts.loss(out.item())
dist.destroy_process_group()
facts.end()
