"""Lightning on polycast: while torch is patched, its precision plugins create polycast regions.

pip install pytorch-lightning
python examples/with_lightning.py
"""

import pytorch_lightning
import torch

import polycast


class Regression(pytorch_lightning.LightningModule):
    """A plain Lightning module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


x = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = Regression()
with polycast.patch_torch(), polycast.observe(model) as seen:
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_epochs=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, 32))
print(f"loss {trainer.callback_metrics['loss']:.3f}")
print(f"{sum(region.entries for region in seen.regions)} regions; {seen.headline}")
