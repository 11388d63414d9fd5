"""What kernels of recipes are held to: the product in float64, and how far from it numbers of so few bits may be."""

from typing import Any

import torch

from ..plugins.backend import LowBitKernel

_SMALLEST = 2.0**-110
"""Values may be quantized as if one of this size were among them, so that scales and their inverses stay normal."""


def int8_product(x: torch.Tensor, weight: torch.Tensor, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x @ weight.T`` in float64, and how far from it a product of int8 may be.

    With 255 levels to a scale, a value is off by half a level: x' = x + dx and w' = w + dw give
    x'w' - xw = dx w + x dw + dx dw, of which each term is summed over its magnitudes. A thousandth more is for scales
    that are rounded themselves.

    Args:
        x: activations [..., K].
        weight: [N, K], with a scale for each row.
        by_row: whether each row of `x` has a scale, or all have one.
    """
    x, weight = x.double(), weight.double()
    of_x, of_weight = _level(x, -1 if by_row else None), _level(weight, 1).T
    error = of_x * weight.abs().sum(1) + x.abs().sum(-1, keepdim=True) * of_weight + x.shape[-1] * of_x * of_weight / 2
    return x @ weight.T, error / 2 * 1.001


def float8_product(x: torch.Tensor, weight: torch.Tensor, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same for a product of float8 (e4m3), with scales for rows of both or one for each.

    A value is off by half of its last bit: by 2**-4 of itself, or by 2**-10 scales where it is below the normal
    numbers. A thousandth of the sum of magnitudes is for how the products are added.
    """
    x, weight = x.double(), weight.double()
    of_x, of_weight = (_float8_error(values, by_row) for values in (x, weight))
    magnitudes = x.abs() @ weight.abs().T
    error = of_x @ (weight.abs() + of_weight).T + x.abs() @ of_weight.T
    return x @ weight.T, error * 1.001 + magnitudes / 1000


def _float8_error(values: torch.Tensor, by_row: bool) -> torch.Tensor:
    largest = values.abs().amax(-1, keepdim=True) if by_row else values.abs().amax()
    return torch.maximum(values.abs() / 2**4, largest.clamp(min=_SMALLEST) / 448 / 2**10)


def _level(values: torch.Tensor, dim: int | None) -> torch.Tensor:
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    return largest.clamp(min=_SMALLEST) / 127


def assert_within(actual: torch.Tensor, expected: torch.Tensor, error: torch.Tensor) -> None:
    """Check a result that is off by some error and then rounded to its dtype.

    Raises:
        AssertionError: it is off by more, or has another shape.
    """
    assert actual.shape == expected.shape, f"the shape is {tuple(actual.shape)}, not {tuple(expected.shape)}"
    limits = torch.finfo(actual.dtype)
    allowed = error + (expected.abs() + error) * limits.eps + limits.smallest_normal
    off = ((actual.double() - expected).abs() / allowed).nan_to_num(nan=torch.inf)
    assert (off <= 1).all(), f"the error is {off.max().item():.3g} times what the recipe may bring"


def run_kernel(kernel: LowBitKernel, *args: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Call a kernel as polycast does, in a region with a fast dtype.

    Raises:
        AssertionError: it declines, cannot pack the weight, or returns another dtype.
    """
    reason = kernel.declines(*args)
    assert reason is None, f"it declines: {reason}"
    device_type = args[kernel.weight].device.type
    before = torch.get_autocast_dtype(device_type)
    torch.set_autocast_dtype(device_type, dtype)
    try:
        with torch.no_grad():
            prepared = kernel.prepare(args[kernel.weight])
            assert prepared is not None, "the weight cannot be packed"
            result = kernel.run(prepared, *args)
    finally:
        torch.set_autocast_dtype(device_type, before)
    assert result.dtype is dtype, f"the result is {result.dtype}, not {dtype}"
    return result
