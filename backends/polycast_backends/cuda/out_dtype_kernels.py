"""CUDA matmuls with wider outputs: int8 into int32, bfloat16 and float16 into float32.

A build of torch without CUDA has none of the kernels. They are not timed on a GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from polycast.plugin import Backend

_OPS = torch.ops.aten
_int_mm: Any = getattr(torch, "_int_mm", None)


def _resized(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return a contiguous matrix, zero-padded or cropped to a size."""
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
    # torch._int_mm on CUDA needs more than 16 rows, and multiples of 8 elsewhere. A comment in its source warns of
    # transposed inputs, so these are contiguous.
    wide, tall = _next_8(columns), max(24, _next_8(rows))
    product = _int_mm(_resized(a, tall, _next_8(terms)), _resized(b, _next_8(terms), wide))
    return _resized(product, rows, columns)


def kernel_table(has_kernel: Callable[[Any], bool]) -> dict[Any, Callable[..., Any]]:
    """Return the kernels that call ops of torch for which `has_kernel` is true."""
    has_int_mm = _int_mm is not None and has_kernel(_OPS._int_mm.default)
    int8 = {(_OPS.mm.default, torch.int8, torch.int32): mm_int8} if has_int_mm else {}
    # A build for ROCm registers the products in float32 too, but they raise.
    return {**int8, **({} if torch.version.hip else Backend.float32_products(has_kernel))}


KERNELS = kernel_table(lambda op: bool(op.has_kernel_for_dispatch_key("CUDA")))
