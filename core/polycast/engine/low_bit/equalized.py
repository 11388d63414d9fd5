"""The equalization of a recipe in use: the factors of each weight that a kernel prepacks."""

from collections.abc import Callable
from typing import Any

import torch

from ...plugins.backend import LowBitKernel
from ...policy.recipe import Recipe

_IS_TRANSPOSED = {"aten::linear": False, "aten::matmul": True, "aten::mm": True, "aten::addmm": True}
"""By op with a matrix as its weight: whether that is [K, N]."""


def matrix_of(op: str, weight: torch.Tensor) -> torch.Tensor | None:
    """Return the weight of an op as a matrix [N, K], a row for each output feature; None if it is none."""
    is_transposed = _IS_TRANSPOSED.get(op)
    if is_transposed is None or weight.dim() != 2:
        return None
    return weight.t() if is_transposed else weight


def factors_of(recipe: Recipe, op: str, weight: torch.Tensor) -> torch.Tensor | None:
    """Return the factors [K] of the weight of an op; None if the recipe has none for it."""
    equalization = getattr(recipe, "equalization", None)
    matrix = matrix_of(op, weight)
    if equalization is None or matrix is None:
        return None
    factors: torch.Tensor | None = equalization.factors(matrix)
    return factors


def checked_prepack(
    kernel: LowBitKernel, recipe: Recipe, op: str
) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...] | None]:
    """Return a kernel's prepack() with the weight's factors and a check of its result.

    The result is usable in every grad and inference mode.
    """

    def prepack(weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        with torch.inference_mode(False), torch.no_grad():
            plain = weight.detach()
            factors = factors_of(recipe, op, plain) if kernel.equalizes else None
            kernel_prepack: Callable[..., Any] = kernel.prepack
            packed = kernel_prepack(plain) if factors is None else kernel_prepack(plain, factors)
            if isinstance(packed, torch.Tensor):  # a sequence too
                raise TypeError(f"{type(kernel).__name__}.prepack must return a tuple of tensors or None, got a tensor")
            return tuple(packed or ()) or None

    return prepack
