import facts

facts.begin()

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import set_seed  # noqa: E402

facts.late()
accelerator = Accelerator(cpu=True)
set_seed(5)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(16 * facts.STEPS, 4), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    out = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    accelerator.backward(out)
    optimizer.step()
    facts.loss(accelerator.gather(out.detach().reshape(1)).mean().item())
accelerator.wait_for_everyone()
facts.end()
