"""Calls of kernels of recipes, and the results that they should have."""

import torch

from polycast import Float8
from polycast_plugins.testing.low_bit import LINEAR_OPS, run_prepacked


def float8_product(x, weight, by_row):
    """Return ``x @ weight.T`` in float64, and the error bound of a float8 product, with scales by row or one each."""
    return LINEAR_OPS["aten::linear"].within(Float8("row" if by_row else "tensor"), (x, weight, None), random=False)


def run_kernel(kernel, *args, dtype=torch.float32):
    """Prepack the weight, and call a kernel as polycast does, in a region with a fast dtype."""
    reason = kernel.unsupported_reason(*args)
    assert reason is None, f"it is not supported: {reason}"
    with torch.no_grad():
        prepared = kernel.prepack(args[kernel.weight])
    assert prepared is not None, "the weight cannot be prepacked"
    return run_prepacked(kernel, prepared, *args, dtype=dtype)
