"""Matrix products: float16 operands, sums in float32, rounded once, as on accelerators."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .adapter import widen


def multiply(self: Any, mat2: Any) -> Any:
    """Return the product of two matrices, or of batches of them."""
    # BLAS, which NumPy calls, has no float16: a product of float16 arrays would be a plain loop with float16 sums.
    return np.matmul(widen(self), widen(mat2))


def multiply_add(self: Any, mat1: Any, mat2: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """Return the weighted sum of a matrix and a product of two."""
    product = multiply(mat1, mat2)
    if alpha != 1:
        product *= product.dtype.type(alpha)
    return product if beta == 0 else product + (self if beta == 1 else self * beta)


def multiply_add_batches(self: Any, batch1: Any, batch2: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """Return the weighted sum of matrices and products of two."""
    return multiply_add(self, batch1, batch2, beta, alpha)


def multiply_add_vector(self: Any, mat: Any, vec: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """Return the weighted sum of a vector and the product of a matrix with one."""
    return multiply_add(self, mat, vec, beta, alpha)


def dot(self: Any, tensor: Any) -> Any:
    """Return the product of two vectors, in their dtype."""
    return multiply(self, tensor).astype(self.dtype)


KERNELS: dict[str, Callable[..., Any]] = {
    "mm.out": multiply,
    "bmm.out": multiply,
    "addmm.out": multiply_add,
    "baddbmm.out": multiply_add_batches,
    "addmv.out": multiply_add_vector,
    "dot": dot,
}
