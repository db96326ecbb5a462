import os

import facts

facts.begin()

import torch  # noqa: E402
from transformers import (LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments)  # noqa: E402

facts.late()


class Told(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            facts.loss(logs["loss"])


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        ids = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                     num_attention_heads=2, max_position_embeddings=16))
args = TrainingArguments(os.path.join(facts.DIR, "out"), max_steps=facts.STEPS, per_device_train_batch_size=4, use_cpu=True,
                         logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, ddp_backend="gloo", seed=9,
                         dataloader_num_workers=1)
Trainer(model=model, args=args, train_dataset=Tokens(), callbacks=[Told()]).train()
facts.end()
