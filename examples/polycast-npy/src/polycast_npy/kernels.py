"""Kernels for `polycast.out_dtype`, whose results have another dtype than the inputs."""

from typing import Any

import torch

from .tensors import array, from_array


def int8_mm(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Multiply two int8 matrices into an int32 one; for other arguments polycast returns torch's result, or its error.

    NumPy has no fast product of integers. That of float64 matrices is BLAS's, and exact here: a product of two int8 has
    15 bits, so that sums of 2**38 of them fit in the 53 of a float64.
    """
    if not (a.dtype == b.dtype == torch.int8 and a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0]):
        return NotImplemented
    product = array(a).astype("float64") @ array(b).astype("float64")
    return from_array(product.astype("int64").astype("int32"))  # an int32 wraps, where a float would saturate


KERNELS = {(torch.ops.aten.mm.default, torch.int8, torch.int32): int8_mm}
