"""The Trainer of transformers on polycast: while torch is patched, it creates polycast regions.

    pip install transformers accelerate
    python examples/with_trainer.py

A GPT-2 of two layers with random weights learns a sequence; nothing is downloaded.
"""

import tempfile

import torch
import transformers

import polycast

model = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=64, bos_token_id=0, eos_token_id=0)
)
tokens = torch.arange(64).repeat(64, 1)
data = [{"input_ids": row, "labels": row} for row in tokens]

with polycast.patch_torch(), polycast.observe(model) as seen, tempfile.TemporaryDirectory() as folder:
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            folder, bf16=True, use_cpu=True, num_train_epochs=3, learning_rate=0.01, report_to=[], disable_tqdm=True
        ),
        train_dataset=data,
    )
    print(f"loss {trainer.train().training_loss:.3f}")
print(f"{sum(region.entries for region in seen.regions)} regions; {seen.headline}")
