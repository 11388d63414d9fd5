"""Kernels of CUDA: int8 products in int32, and products of bfloat16 and float16 in float32.

Which of them there are is asked of the dispatcher: a build of torch without CUDA has none. Not measured on a GPU: the
tests have the choice and the shapes on fake tensors, and the int8 results from the CPU's torch._int_mm.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

_OPS = torch.ops.aten


def _resized(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return a contiguous matrix of another size: with zeros added, or cut."""
    missing = (0, columns - matrix.shape[1], 0, rows - matrix.shape[0])
    if any(missing):
        return pad(matrix, missing)
    return matrix if matrix.is_contiguous() else matrix.clone(memory_format=torch.contiguous_format)


def _next_8(size: int) -> int:
    return (size + 7) // 8 * 8


def mm_int8(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Return the int32 product of two int8 matrices."""
    if not a.dtype is b.dtype is torch.int8 or a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        return NotImplemented
    (rows, terms), columns = a.shape, b.shape[1]
    if 0 in (rows, terms, columns):
        return a.new_zeros((rows, columns), dtype=torch.int32)
    # torch._int_mm on CUDA wants more than 16 rows and multiples of 8 elsewhere, and warns of transposed inputs in its
    # source: it is given contiguous ones, and zeros add nothing.
    wide, tall = _next_8(columns), max(24, _next_8(rows))
    product = torch._int_mm(_resized(a, tall, _next_8(terms)), _resized(b, _next_8(terms), wide))
    return _resized(product, rows, columns)


def mm_float32(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Return the float32 product of two matrices of one reduced dtype."""
    if not a.dtype is b.dtype is not torch.float32 or a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        return NotImplemented
    return _OPS.mm.dtype(a, b, torch.float32)


def bmm_float32(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Return the float32 products of two batches of matrices of one reduced dtype."""
    if not a.dtype is b.dtype is not torch.float32 or a.dim() != 3 or b.dim() != 3 or a.shape[::2] != b.shape[:2]:
        return NotImplemented
    return _OPS.bmm.dtype(a, b, torch.float32)


def addmm_float32(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    """Return ``bias + a @ b`` in float32; `bias` may be in float32 too."""
    product = mm_float32(a, b)
    return product if product is NotImplemented else product.add_(bias)


def baddbmm_float32(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    """Return ``bias + a @ b`` in float32 for batches of matrices; `bias` may be in float32 too."""
    product = bmm_float32(a, b)
    return product if product is NotImplemented else product.add_(bias)


_FLOAT32: dict[torch._ops.OpOverload, dict[torch._ops.OpOverload, Callable[..., Any]]] = {
    _OPS.mm.dtype: {_OPS.mm.default: mm_float32, _OPS.addmm.default: addmm_float32},
    _OPS.bmm.dtype: {_OPS.bmm.default: bmm_float32, _OPS.baddbmm.default: baddbmm_float32},
}
"""What stands on each op of torch that multiplies into another dtype."""


def kernel_table(
    has_kernel: Callable[[torch._ops.OpOverload], bool],
) -> dict[tuple[torch._ops.OpOverload, torch.dtype, torch.dtype], Callable[..., Any]]:
    """Return the kernels that stand on ops of torch for which `has_kernel` is true."""
    table: dict[tuple[torch._ops.OpOverload, torch.dtype, torch.dtype], Callable[..., Any]] = {}
    if has_kernel(_OPS._int_mm.default):
        table[_OPS.mm.default, torch.int8, torch.int32] = mm_int8
    for needed, kernels in _FLOAT32.items():
        # ROCm's build registers these too, and each of them raises.
        if has_kernel(needed) and torch.version.hip is None:
            for dtype in (torch.bfloat16, torch.float16):
                table.update({(op, dtype, torch.float32): kernel for op, kernel in kernels.items()})
    return table


def _has_kernel(op: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op._name, "CUDA")


KERNELS = kernel_table(_has_kernel)
