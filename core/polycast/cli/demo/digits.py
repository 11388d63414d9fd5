"""The demo's data and network: scikit-learn's handwritten digits, and a small convolutional network."""

import importlib
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn

SEED = 0
_TEST_IMAGES = 360


@dataclass(frozen=True)
class Digits:
    """Images of shape (n, 1, 8, 8), float32 from 0 to 1, and their labels, split in two."""

    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    def to(self, device_type: str) -> "Digits":
        """Return the digits on a device."""
        return Digits(*(part.to(device_type) for part in vars(self).values()))


def load_digits() -> Digits:
    """Return the 1,797 digits that come with scikit-learn, split at random with a fixed seed.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    data = importlib.import_module("sklearn.datasets").load_digits()
    images = torch.as_tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(data.target)
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    test, train = shuffled[:_TEST_IMAGES], shuffled[_TEST_IMAGES:]
    return Digits(images[train], labels[train], images[test], labels[test])


def network(device_type: str) -> nn.Sequential:
    """Return the network on a device; its weights are the same at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        layers = OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(1, 32, 3, padding=1),
            norm1=nn.GroupNorm(8, 32),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3, stride=2, padding=1),
            norm2=nn.GroupNorm(8, 64),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            hidden=nn.Linear(64 * 4 * 4, 64),
            relu3=nn.ReLU(),
            logits=nn.Linear(64, 10),
        )
        return nn.Sequential(layers).to(device_type)
