"""Matrix products of reduced dtypes in float32, for devices on which torch has kernels for them.

They use the overloads ``mm.dtype`` and ``bmm.dtype``, which compute in another dtype than that of their inputs, and
have kernels only on some devices and in some builds of torch.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..torch_internals.dispatcher import OpOverload

_OPS = torch.ops.aten


def _product(op: OpOverload, dimensions: int) -> Callable[..., Any]:
    def kernel(a: torch.Tensor, b: torch.Tensor) -> Any:
        """Return the float32 product of two matrices, or batches of matrices, of one reduced dtype."""
        if not a.dtype is b.dtype is not torch.float32 or not a.dim() == b.dim() == dimensions:
            return NotImplemented
        if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
            return NotImplemented
        return op(a, b, torch.float32)

    return kernel


def _sum(product: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        """Return ``bias + a @ b`` in float32; `bias` may be in float32 too."""
        result = product(a, b)
        return result if result is NotImplemented else result.add_(bias)

    return kernel


def float32_products(has_kernel: Callable[[OpOverload], bool]) -> dict[Any, Callable[..., Any]]:
    """Return the kernels of :meth:`Backend.float32_products`."""
    found: dict[Any, Callable[..., Any]] = {}
    for needed, dimensions, multiplies, adds in (
        (_OPS.mm.dtype, 2, _OPS.mm.default, _OPS.addmm.default),
        (_OPS.bmm.dtype, 3, _OPS.bmm.default, _OPS.baddbmm.default),
    ):
        product = _product(needed, dimensions)
        for dtype in (torch.bfloat16, torch.float16) if has_kernel(needed) else ():
            found[multiplies, dtype, torch.float32] = product
            found[adds, dtype, torch.float32] = _sum(product)
    return found
