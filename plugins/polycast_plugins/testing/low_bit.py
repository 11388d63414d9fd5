"""The reference for low-bit kernels: the float64 product, and a bound of the quantization error."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polycast import Float8, Int4, Int8
from polycast.plugin import LowBitKernel
from polycast.policy.recipe import Recipe
from polycast.policy.schemas import existing_op, unflatten_arguments

_SMALLEST = 2.0**-110
"""Scales are at least those of a value of this size, so that they and their inverses are normal."""


@dataclass(frozen=True)
class LinearOp:
    """An op that is linear in its activations and in its weight.

    Attributes:
        op: its name in the dispatcher.
        features: the dimension of the weight that holds the output features.
        added: the position of the bias; None: it has none.
        activations: their position.
        weight: its position.
        rows: whether a row of the activations (their last dimension) makes a row of the output.
    """

    op: str
    features: int
    added: int | None = None
    activations: int = 0
    weight: int = 1
    rows: bool = True

    def __call__(self, args: Sequence[Any]) -> torch.Tensor:
        """Call the op."""
        op = existing_op(self.op)
        positional, named = unflatten_arguments(op, args)
        with torch.no_grad():
            result: torch.Tensor = op(*positional, **named)
        return result

    def within(self, recipe: Recipe, args: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the op's result in float64, and the error bound of a recipe.

        Values x' = x + dx and w' = w + dw give x'w' - xw = dx w + x dw + dx dw. The op of the magnitudes bounds it.
        In 4 bits that would allow anything. There the bound is a multiple of the standard deviation, for random values.
        """
        exact = [arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args]
        x, weight = exact[self.activations], exact[self.weight]
        if isinstance(recipe, Int4):
            dx, dw = _int8_error(x, [-1]), self._int4_error(weight, recipe.group_size)
            return self(exact), _INT4_DEVIATIONS * self._sum_of_products(exact, dx, dw, power=2).sqrt()
        error = _ERRORS[recipe.kind]
        other_than_features = [dim for dim in range(weight.dim()) if dim != self.features]
        by_row = recipe.settings["scales"] == "row"
        by_feature = by_row or recipe.kind == Int8.kind
        dx = error(x, [-1] if by_row and self.rows else None)
        dw = error(weight, other_than_features if by_feature else None)
        return self(exact), self._sum_of_products(exact, dx, dw, power=1)

    def _int4_error(self, weight: torch.Tensor, group_size: int) -> torch.Tensor:
        """Return half of the distance of 16 levels, by group of a weight."""
        rows = weight.movedim(self.features, 0)
        padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % group_size))
        groups = padded.reshape(rows.shape[0], -1, group_size)
        largest = _largest(groups, [2]).expand(groups.shape).flatten(1)[:, : rows.shape[1]]
        return (largest / 16).movedim(0, self.features)

    def _sum_of_products(self, exact: Sequence[Any], dx: torch.Tensor, dw: torch.Tensor, power: int) -> torch.Tensor:
        """Return the op of the powers of ``dx w``, ``x dw`` and ``dx dw``, added up."""
        x, weight = exact[self.activations].abs(), exact[self.weight].abs()
        pairs = [(dx, weight), (x, dw), (dx, dw)]
        return sum((self(self._of(exact, *pair, power)) for pair in pairs), torch.zeros((), dtype=x.dtype))

    def _of(self, args: Sequence[Any], x: torch.Tensor, weight: torch.Tensor, power: int) -> list[Any]:
        """Return arguments with powers of other activations and another weight, without the bias."""
        given = list(args)
        given[self.activations], given[self.weight] = x**power, weight**power
        if self.op == "aten::addmm":
            given = [torch.zeros_like(given[0]), *given[1:4], abs(given[4]) ** power]
        elif self.added is not None:
            given[self.added] = None
        return given


LINEAR_OPS = {
    product.op: product
    for product in (
        LinearOp("aten::linear", features=0, added=2),
        LinearOp("aten::mm", features=1),
        LinearOp("aten::matmul", features=1),
        LinearOp("aten::addmm", features=1, added=0, activations=1, weight=2),
        LinearOp("aten::conv2d", features=0, added=2, rows=False),
    )
}
"""The ops with a reference, by name."""


def _largest(values: torch.Tensor, dims: list[int] | None) -> torch.Tensor:
    if values.numel() == 0:
        return torch.full((), _SMALLEST, dtype=values.dtype)
    magnitudes = values.abs()
    return (magnitudes.amax() if dims is None else magnitudes.amax(dims, keepdim=True)).clamp(min=_SMALLEST)


def _int8_error(values: torch.Tensor, dims: list[int] | None) -> torch.Tensor:
    """Return half of one of 255 levels, and a thousandth more for the rounding of scales."""
    return (_largest(values, dims) / 127 / 2 * 1.001).expand(values.shape).contiguous()


def _float8_error(values: torch.Tensor, dims: list[int] | None) -> torch.Tensor:
    """Return half of the last of 4 bits, where the largest value is 448 and the smallest are multiples of 2**-9.

    A hundredth more is for the rounding of scales and sums.
    """
    scale = _largest(values, dims) / 448
    return torch.maximum(values.abs() / 16, (scale / 2**10).expand(values.shape)) * 1.01


_INT4_DEVIATIONS = 4.0
"""The error bound of 4 bits in halves of levels, which are 1.7 standard deviations of rounding."""

_ERRORS: dict[str, Callable[[torch.Tensor, list[int] | None], torch.Tensor]] = {
    Int8.kind: _int8_error,
    Float8.kind: _float8_error,
}


def assert_within(actual: torch.Tensor, expected: torch.Tensor, error: torch.Tensor) -> None:
    """Check that a result is within an error of the expected one, before the rounding to its dtype.

    Raises:
        AssertionError: it is not, or its shape differs.
    """
    assert actual.shape == expected.shape, f"the shape is {tuple(actual.shape)}, not {tuple(expected.shape)}"
    limits = torch.finfo(actual.dtype)
    allowed = error + (expected.abs() + error) * limits.eps + limits.smallest_normal
    off = ((actual.double() - expected).abs() / allowed).nan_to_num(nan=torch.inf)
    assert (off <= 1).all(), f"the error is {off.max().item():.3g} times the bound of the recipe"


def run_prepacked(
    kernel: LowBitKernel, prepared: tuple[torch.Tensor, ...], *args: Any, dtype: torch.dtype, records: bool = False
) -> torch.Tensor:
    """Call a kernel with a prepacked weight, in a region with a fast dtype; `records`: with autograd.

    Raises:
        AssertionError: it returns another dtype than `dtype`.
    """
    device_type = args[kernel.weight].device.type
    before = torch.get_autocast_dtype(device_type)
    torch.set_autocast_dtype(device_type, dtype)
    try:
        with torch.set_grad_enabled(records):
            result = kernel.run(prepared, *args)
    finally:
        torch.set_autocast_dtype(device_type, before)
    assert result.dtype is dtype, f"the result is {result.dtype}, not {dtype}"
    return result
