"""Views: tensors that lie in another way on the same storage. torch makes all others of these."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..tensors import contiguous_strides, metadata_kernel, place
from .adapter import find


def resize_(tensor: torch.Tensor, size: Sequence[int], *, memory_format: Any = None) -> torch.Tensor:
    """Give a tensor another size, and more memory where it has too little; what it holds is not kept then."""
    stride = contiguous_strides(size)
    needed = (tensor.storage_offset() + math.prod(size)) * tensor.itemsize
    storage = tensor.untyped_storage()
    if needed > storage.nbytes():
        return place(tensor, np.empty(math.prod(size) * tensor.itemsize, np.uint8), size, stride)
    return torch._C.TensorBase.set_(tensor, storage, tensor.storage_offset(), size, stride)


KERNELS = {
    name: metadata_kernel(find(name))
    for name in ("as_strided", "view", "_reshape_alias", "unfold", "set_.source_Storage_storage_offset")
} | {"resize_": resize_}
