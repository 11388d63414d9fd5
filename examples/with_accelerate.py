"""Accelerate on polycast: while torch is patched, it creates polycast regions.

    python examples/with_accelerate.py

For a program that you cannot change: ``accelerate launch --no_python polycast run train.py``.
"""

import accelerate
import torch

import polycast

polycast.patch_torch().start()

accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
x = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model, optimizer, batches = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, 32))

with polycast.observe(model) as seen:
    for epoch in range(10):
        for inputs, targets in batches:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1}  loss {loss.item():.3f}")
print(f"{sum(region.entries for region in seen.regions)} regions; {seen.headline}")
