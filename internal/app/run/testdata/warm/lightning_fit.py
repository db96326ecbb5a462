import facts

facts.begin()

import lightning  # noqa: E402
import torch  # noqa: E402
from lightning.fabric.utilities.rank_zero import rank_zero_only  # noqa: E402

facts.late()
facts.same("rank, as Lightning reads it at its import", rank_zero_only.rank)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, x, _):
        out = (self.layer(x) - x.sum(1, keepdim=True)).square().mean()
        facts.loss(out.item())
        return out

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(2)
loader = torch.utils.data.DataLoader(torch.randn(16 * facts.STEPS, 4), batch_size=8)
trainer = lightning.Trainer(accelerator="cpu", devices=facts.WORLD, strategy="ddp", max_epochs=1, logger=False,
                            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Net(), loader)
facts.end()
