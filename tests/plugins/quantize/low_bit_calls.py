"""Calls of kernels of recipes, and the results that they should have."""

import torch

from polycast import Float8, Int8
from polycast_plugins.testing.low_bit import LINEAR_OPS, run_prepacked


def int8_product(x, weight, by_row):
    """Return ``x @ weight.T`` in float64, and the error bound of an int8 product.

    Args:
        x: activations [..., K].
        weight: [N, K], one scale for each row.
        by_row: whether each row of `x` has a scale, or `x` has one.
    """
    return LINEAR_OPS["aten::linear"].within(Int8("row" if by_row else "tensor"), (x, weight, None), random=False)


def float8_product(x, weight, by_row):
    """Return the same for float8 (e4m3), with scales by row of both arguments, or one of each."""
    return LINEAR_OPS["aten::linear"].within(Float8("row" if by_row else "tensor"), (x, weight, None), random=False)


def run_kernel(kernel, *args, dtype=torch.float32):
    """Prepack the weight, and call a kernel as polycast does, in a region with a fast dtype."""
    reason = kernel.unsupported_reason(*args)
    assert reason is None, f"it is not supported: {reason}"
    with torch.no_grad():
        prepared = kernel.prepack(args[kernel.weight])
    assert prepared is not None, "the weight cannot be prepacked"
    return run_prepacked(kernel, prepared, *args, dtype=dtype)
