"""XPU matmuls with wider outputs: int8 into int32, bfloat16 and float16 into float32.

A build of torch without XPU has none of the kernels. Not measured on a GPU: tests check the choice and the shapes on
fake tensors, and int8 with a product in int32.
"""

from collections.abc import Callable
from typing import Any

import torch

from polycast.plugin import Backend

_OPS = torch.ops.aten
_int_mm: Any = getattr(torch, "_int_mm", None)


def mm_int8(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Return the int32 product of two int8 matrices."""
    if not a.dtype is b.dtype is torch.int8 or a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        return NotImplemented
    (rows, terms), columns = a.shape, b.shape[1]
    if 0 in (rows, terms, columns):
        return a.new_zeros((rows, columns), dtype=torch.int32)
    # Contiguous, also in the strides: those of a single row or column are arbitrary.
    return _int_mm(a.reshape(-1).view(rows, terms), b.reshape(-1).view(terms, columns))


def kernel_table(has_kernel: Callable[[Any], bool]) -> dict[Any, Callable[..., Any]]:
    """Return the kernels that call ops of torch for which `has_kernel` is true."""
    has_int_mm = _int_mm is not None and has_kernel(_OPS._int_mm.default)
    int8 = {(_OPS.mm.default, torch.int8, torch.int32): mm_int8} if has_int_mm else {}
    return {**int8, **Backend.float32_products(has_kernel)}


KERNELS = kernel_table(lambda op: bool(op.has_kernel_for_dispatch_key("XPU")))
