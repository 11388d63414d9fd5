"""Train a classifier of handwritten digits in mixed precision, with a plain loop.

It has a region, a gradient scaler that is enabled only if the dtype needs it, gradient accumulation over micro-batches,
clipping, activation checkpointing (``--recompute``), and a file to resume from.

    pip install ".[demo]"
    python examples/train.py --dtype float16 --resume digits.pt
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.checkpoint import checkpoint

import polycast


def load(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 1797 images, pixels from 0 to 1, and their digits, shuffled."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    return images.to(device), torch.tensor(digits.target)[order].to(device)


class Network(nn.Module):
    """Two convolutions and a classifier."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits for the digits."""
        if not (self.recompute and self.training):
            return self.classifier(self.features(x).flatten(1))
        # The backward pass recomputes the features in the region of this forward pass.
        return self.classifier(checkpoint(self.features, x, use_reentrant=False).flatten(1))


def main() -> None:
    """Train, and print the results of each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=2, help="the number for each optimizer step")
    parser.add_argument("--recompute", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--resume", type=Path, help="the checkpoint to resume from, if it exists, and to write")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)

    torch.manual_seed(0)
    images, digits = load(options.device)
    split, batch = 1440, 32
    model = Network(options.recompute).to(options.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    scaler = polycast.grad_scaler(options.device, dtype)
    enabled = dtype is not torch.float32
    # The weights do not change while gradients are accumulated: all micro-batches of a step share their casts.
    region = polycast.autocast(options.device, dtype if enabled else None, enabled, cache=polycast.WeightCache())

    first = 0
    if options.resume and options.resume.exists():
        saved = torch.load(options.resume, weights_only=True)
        model.load_state_dict(saved["model"])  # float32, like the weights
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        first = saved["epochs"]

    for epoch in range(first, options.epochs):
        model.train()
        order = torch.randperm(split, generator=torch.Generator().manual_seed(epoch)).to(options.device)
        steps = [part.chunk(options.micro_batches) for part in order.split(batch * options.micro_batches)]
        for step in steps:
            for chosen in step:
                with region:
                    loss = nn.functional.cross_entropy(model(images[chosen]), digits[chosen])
                scaler.scale(loss / len(step)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), region:
            right = (model(images[split:]).argmax(1) == digits[split:]).float().mean().item()
        print(f"epoch {epoch + 1}  loss {loss.item():.3f}  accuracy {right:.1%}", flush=True)
        if options.resume:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            torch.save({**state, "epochs": epoch + 1}, options.resume)


if __name__ == "__main__":
    main()
