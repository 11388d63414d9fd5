"""Random numbers: the CPU's, so that a seed gives the same ones on both devices."""

from collections.abc import Callable
from typing import Any

import torch

from .adapter import find


def _drawn_on_cpu(name: str) -> Callable[..., torch.Tensor]:
    op = find(name)

    def draw(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor.copy_(op(torch.empty(tensor.shape, dtype=tensor.dtype), *args, **kwargs))

    return draw


def randperm(n: int, *, generator: torch.Generator | None = None, out: torch.Tensor) -> torch.Tensor:
    """Draw a permutation of the first integers."""
    return out.resize_(n).copy_(torch.randperm(n, generator=generator, dtype=out.dtype))


def dropout(tensor: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop elements at random and scale those that stay; return which stayed too."""
    if not train:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    kept = torch.empty(tensor.shape, dtype=torch.bool).bernoulli_(1 - p).to(tensor.device)
    return tensor * kept * (0.0 if p == 1 else 1 / (1 - p)), kept


def dropout_backward(grad: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the gradient of what was not dropped."""
    return grad * kept * scale


KERNELS = {
    name: _drawn_on_cpu(name)
    for name in ("normal_", "uniform_", "bernoulli_.float", "random_", "random_.to", "random_.from", "exponential_")
} | {
    "randperm.generator_out": randperm,
    "native_dropout": dropout,
    "native_dropout_backward": dropout_backward,
}
