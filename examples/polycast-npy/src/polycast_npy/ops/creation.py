"""New tensors."""

from collections.abc import Sequence
from typing import Any

import torch

from ..tensors import contiguous_strides, new_tensor


def empty(
    size: Sequence[int], dtype: torch.dtype | None = None, *, memory_format: Any = None, **_: Any
) -> torch.Tensor:
    """Return a tensor with the strides of a memory format."""
    strides = contiguous_strides(size)
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        strides = list(torch.empty(size, memory_format=memory_format, device="meta").stride())
    return new_tensor(size, strides, dtype or torch.get_default_dtype())


def empty_strided(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    """Return a tensor with given strides."""
    return new_tensor(size, stride, dtype or torch.get_default_dtype())


KERNELS = {"empty.memory_format": empty, "empty_strided": empty_strided}
