"""Equalize weights when they are prepacked, by the factors that a recipe has for each."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from polycast.plugin import LowBitKernel, Plan, Recipe

_IS_TRANSPOSED = {"aten::linear": False, "aten::matmul": True, "aten::mm": True, "aten::addmm": True}
"""For each op whose weight is a matrix, whether that is stored as [K, N]."""


def matrix_of(op: str, weight: torch.Tensor) -> torch.Tensor | None:
    """Return the weight of an op as a matrix [N, K], a row for each output feature; None if it is no matrix."""
    is_transposed = _IS_TRANSPOSED.get(op)
    if is_transposed is None or weight.dim() != 2:
        return None
    return weight.t() if is_transposed else weight


def activations_of(op: str, args: Sequence[Any]) -> torch.Tensor:
    """Return the activations [..., K] among the arguments of an op whose weight is a matrix."""
    activations: torch.Tensor = args[1 if op == "aten::addmm" else 0]
    return activations


def product_arguments(op: str, x: torch.Tensor, weight: torch.Tensor) -> tuple[Any, ...]:
    """Return arguments of an op for the product of activations [M, K] by its weight, without a bias."""
    if op == "aten::linear":
        return x, weight, None
    return (x.new_zeros(weight.shape[1]), x, weight, 1, 1) if op == "aten::addmm" else (x, weight)


def _factors_of(recipe: Recipe, op: str, weight: torch.Tensor) -> torch.Tensor | None:
    """Return the factors [K] of the weight of an op; None if the recipe has none for it."""
    equalization = _equalization_of(recipe)
    matrix = matrix_of(op, weight)
    if equalization is None or matrix is None:
        return None
    factors: torch.Tensor | None = equalization.factors(matrix)
    return factors


def _equalization_of(recipe: Recipe) -> Any:
    """Return the equalization of a recipe, or None.

    Raises:
        RuntimeError: the recipe was read from text, in compiled code, and this process lacks the equalization.
    """
    if getattr(recipe, "equalization", None) is None:
        return None
    equalization = recipe.known("equalization")
    if equalization is None:
        raise RuntimeError(
            f"{recipe!r} is in compiled code of another process, and this process does not have its equalization: load "
            "it with polycast.Equalization.load, and make a recipe of it, before the code runs"
        )
    return equalization


def describe(recipe: Recipe, kernel: LowBitKernel, op: str, weight: torch.Tensor) -> str:
    """Return whether a weight, which may be fake, is equalized; "" if that is unknown, or there is no equalization."""
    equalization = _equalization_of(recipe)
    matrix = matrix_of(op, weight)
    if equalization is None or Plan.is_special(weight):
        return ""
    if matrix is None or not kernel.equalizes:
        return "not equalized: the kernel takes no factors"
    text: str = equalization.describe(matrix)
    return text


def checked_prepack(
    kernel: LowBitKernel, recipe: Recipe, op: str
) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...] | None]:
    """Return a kernel's prepack() with the weight's factors and a check of its result.

    The result is usable in every grad and inference mode.
    """

    def prepack(weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        with torch.inference_mode(False), torch.no_grad():
            detached = weight.detach()
            factors = _factors_of(recipe, op, detached) if kernel.equalizes else None
            kernel_prepack: Callable[..., Any] = kernel.prepack
            prepacked = kernel_prepack(detached) if factors is None else kernel_prepack(detached, factors)
            if isinstance(prepacked, torch.Tensor):  # which tuple() would split into rows
                raise TypeError(f"{type(kernel).__name__}.prepack must return a tuple of tensors or None, got a tensor")
            return tuple(prepacked or ()) or None

    return prepack
