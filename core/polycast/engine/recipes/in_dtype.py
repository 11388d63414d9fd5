"""Compute an op on its arguments in another dtype."""

from collections.abc import Sequence
from typing import Any

import torch

from ...policy.schemas import existing_op, unflatten_arguments

FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""The dtypes that recipes convert."""


def in_dtype(op: str, args: Sequence[Any], dtype: torch.dtype) -> Any:
    """Cast the arguments of an op, given by its name, to a dtype, and return what it computes from them."""
    overload = existing_op(op)  # at each call: a library may define the op again
    if dtype is torch.float32 and should_make_contiguous(op, args):
        args = (args[0].to(dtype, memory_format=torch.contiguous_format).contiguous(), *args[1:])
    converted = [arg.to(dtype) if isinstance(arg, torch.Tensor) and arg.dtype in FLOATS else arg for arg in args]
    positional, named = unflatten_arguments(overload, converted)
    return overload(*positional, **named)


def should_make_contiguous(op: str, args: Sequence[Any]) -> bool:
    """Return whether the first argument should be made contiguous: otherwise torch may copy the matrix for each batch.

    See also native/kernel.h.
    """
    if op not in ("aten::linear", "aten::matmul"):
        return False
    first, matrix = args[:2]
    if any(each.is_nested or each.layout is not torch.strided for each in (first, matrix)):
        return False
    return first.dim() > 2 and matrix.dim() <= 2 and not first.is_contiguous()
