"""Kernels that compute an op with another output dtype than its inputs'."""

import torch

from .tensors import array, from_array


def int8_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply two int8 matrices into an int32 one.

    NumPy has no fast product of integers. That of float64 matrices is BLAS's, and exact here: a product of two int8 has
    15 bits, so that sums of 2**38 of them fit in the 53 of a float64.
    """
    product = array(a).astype("float64") @ array(b).astype("float64")
    return from_array(product.astype("int64").astype("int32"))  # an int32 wraps, where a float would saturate


KERNELS = {(torch.ops.aten.mm.default, torch.int8, torch.int32): int8_mm}
