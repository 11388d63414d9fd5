"""int8 matmuls with int32 output on the CPU: by oneDNN, or in float32 where that is exact and faster.

There are none for bfloat16 and float16: torch has no kernel on the CPU that multiplies them into float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from .instructions import capabilities

_int_mm: Any = getattr(torch, "_int_mm", None)
_EXACT_TERMS = 1024
"""The sum of so many int8 products is at most 2**24, up to which float32 holds every integer."""

_SMALL = 48**3
"""Matmuls with fewer multiplications are faster in one batched float32 call than in an int8 call each."""


@functools.cache
def _multiplies_int8() -> bool:
    """Return whether oneDNN multiplies int8 on this CPU, and exactly.

    Without VNNI torch uses a plain loop, some hundred times slower than float32. If an environment variable disables
    VNNI, oneDNN adds pairs of products in int16, which saturates.
    """
    if _int_mm is None or not capabilities().get("avx512_vnni"):
        return False
    extreme = torch.full((16, 16), 127, dtype=torch.int8)
    return bool((_int_mm(extreme, extreme) == 16 * 127 * 127).all())


def _has_int_mm() -> bool:
    return bool(torch.backends.mkldnn.enabled) and _multiplies_int8()


def _dense(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with contiguous rows or columns: torch._int_mm is wrong for others.

    It checks the stride of the last dimension first, so it is also wrong for a single row with strides (1, 1).
    """
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    if (right == 1 and down >= columns) or (right != 1 and down == 1 and right >= rows):
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def _in_float32(op: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
    if a.shape[-1] > _EXACT_TERMS:
        return NotImplemented
    return op(a.float(), b.float()).to(torch.int32)


def mm_int8(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Return the int32 product of two int8 matrices."""
    if not a.dtype is b.dtype is torch.int8 or a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        return NotImplemented
    if _has_int_mm():
        return _int_mm(_dense(a), _dense(b))
    return _in_float32(torch.mm, a, b)


def linear_int8(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Return ``x @ weight.T + bias`` in int32; `x` has any number of dimensions, `bias` is int8 or int32."""
    if weight.dim() != 2 or x.dim() == 0 or (bias is not None and bias.shape != weight.shape[:1]):
        return NotImplemented
    product = mm_int8(x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0), weight.t())
    if product is NotImplemented:
        return NotImplemented
    if bias is not None:
        product += bias
    return product.view(*x.shape[:-1], weight.shape[0])


def addmm_int8(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    """Return ``bias + a @ b`` in int32; `bias` is int8 or int32."""
    product = mm_int8(a, b)
    return product if product is NotImplemented else product.add_(bias)


def bmm_int8(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Return the int32 products of two batches of int8 matrices."""
    if not a.dtype is b.dtype is torch.int8 or a.dim() != 3 or b.dim() != 3 or a.shape[::2] != b.shape[:2]:
        return NotImplemented
    (count, rows, terms), columns = a.shape, b.shape[2]
    if not _has_int_mm() or (rows * terms * columns < _SMALL and terms <= _EXACT_TERMS):
        return _in_float32(torch.bmm, a, b)
    result = a.new_empty((count, rows, columns), dtype=torch.int32)
    for left, right, out in zip(a.unbind(), b.unbind(), result.unbind(), strict=True):
        _int_mm(_dense(left), _dense(right), out=out)
    return result


_OPS = torch.ops.aten

KERNELS: dict[Any, Callable[..., Any]] = {
    (_OPS.mm.default, torch.int8, torch.int32): mm_int8,
    (_OPS.linear.default, torch.int8, torch.int32): linear_int8,
    (_OPS.addmm.default, torch.int8, torch.int32): addmm_int8,
    (_OPS.bmm.default, torch.int8, torch.int32): bmm_int8,
}
