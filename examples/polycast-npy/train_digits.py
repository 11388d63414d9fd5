"""Train on scikit-learn's handwritten digits on npy, under polycast's autocast in float16.

Two networks learn, once in float32 and once in mixed precision from the same weights, and each line says how many of
the test images it then knows. Nothing here imports polycast_npy: polycast finds it by its entry point.
"""

import argparse
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import nn

import polycast

DEVICE = "npy"
BATCH = 64


def mlp() -> nn.Sequential:
    """Return a perceptron with two hidden layers."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, 32),
        nn.GELU("tanh"),
        nn.Linear(32, 10),
    )


def cnn() -> nn.Sequential:
    """Return a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return images and labels to train on, and images and labels to test on."""
    data = load_digits()
    images = torch.as_tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return images[train], labels[train], images[test], labels[test]


def batches(images: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the training set in a random order, in batches on the device."""
    for some in torch.randperm(len(images)).split(BATCH):
        yield images[some].to(DEVICE), labels[some].to(DEVICE)


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int, mixed: bool) -> None:
    """Train a model with SGD; in mixed precision the loss is scaled, for float16 is short of small numbers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(DEVICE, enabled=mixed)
    for _ in range(epochs):
        for x, y in batches(images, labels):
            with polycast.autocast(DEVICE, enabled=mixed):
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, mixed: bool) -> tuple[float, torch.dtype]:
    """Return the share of images that a model knows, and the dtype of its output."""
    with torch.no_grad(), polycast.autocast(DEVICE, enabled=mixed):
        logits = model(images.to(DEVICE))
    return (logits.argmax(1).cpu() == labels).float().mean().item(), logits.dtype


def main() -> None:
    """Train both networks in both precisions, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    status = polycast.backends()[DEVICE]
    print(f"{DEVICE}: {status.state}, from {status.distribution} {status.version}, {status.default_dtype}")
    images, labels, test_images, test_labels = digits()
    for make in (mlp, cnn):
        for mixed in (False, True):
            torch.manual_seed(0)
            model = make().to(DEVICE)
            train(model, images, labels, epochs, mixed)
            share, dtype = accuracy(model, test_images, test_labels, mixed)
            print(f"{make.__name__}: {share:.1%} of the test images, computed in {dtype}")


if __name__ == "__main__":
    main()
