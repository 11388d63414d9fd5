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


KERNELS = {
    name: _drawn_on_cpu(name)
    for name in ("normal_", "uniform_", "bernoulli_.float", "random_", "random_.to", "random_.from", "exponential_")
} | {"randperm.generator_out": randperm}
