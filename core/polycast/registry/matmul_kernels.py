"""Matrix products of reduced dtypes in float32, for devices on which torch has kernels for them.

They use the overloads ``mm.dtype`` and ``bmm.dtype``, which compute in another dtype than that of their inputs, and
have kernels only on some devices and in some builds of torch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..torch_internals.dispatcher import OpOverload
from .backend import KernelKey

_OPS = torch.ops.aten


def _mm(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Return the float32 product of two matrices of one reduced dtype."""
    if not a.dtype is b.dtype is not torch.float32 or a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        return NotImplemented
    return _OPS.mm.dtype(a, b, torch.float32)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Return the float32 products of two batches of matrices of one reduced dtype."""
    if not a.dtype is b.dtype is not torch.float32 or a.dim() != 3 or b.dim() != 3 or a.shape[::2] != b.shape[:2]:
        return NotImplemented
    return _OPS.bmm.dtype(a, b, torch.float32)


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    """Return ``bias + a @ b`` in float32; `bias` may be in float32 too."""
    product = _mm(a, b)
    return product if product is NotImplemented else product.add_(bias)


def _baddbmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    """Return ``bias + a @ b`` in float32 for batches of matrices; `bias` may be in float32 too."""
    product = _bmm(a, b)
    return product if product is NotImplemented else product.add_(bias)


_KERNELS: dict[OpOverload, dict[OpOverload, Callable[..., Any]]] = {
    _OPS.mm.dtype: {_OPS.mm.default: _mm, _OPS.addmm.default: _addmm},
    _OPS.bmm.dtype: {_OPS.bmm.default: _bmm, _OPS.baddbmm.default: _baddbmm},
}
"""The kernels that need each overload, by op."""


def float32_products(has_kernel: Callable[[OpOverload], bool]) -> Mapping[KernelKey, Callable[..., Any]]:
    """Return kernels for a backend's table: ``mm``, ``addmm``, ``bmm`` and ``baddbmm`` of reduced dtypes in float32.

    Args:
        has_kernel: returns whether the device has a kernel for an op; called with ``aten::mm.dtype`` and
            ``aten::bmm.dtype``, which these kernels need.

    Example:
        >>> import polycast
        >>> len(polycast.plugin.float32_products(lambda op: True))
        8
    """
    return {
        (op, dtype, torch.float32): kernel
        for needed, kernels in _KERNELS.items()
        if has_kernel(needed)
        for op, kernel in kernels.items()
        for dtype in (torch.bfloat16, torch.float16)
    }
