"""The memory of npy tensors: a storage owns a NumPy array of bytes, and tensors are strided views of it.

torch keeps one Python object for a storage as long as the storage lives, so that an attribute of it is enough to own
the memory. Tensors are torch's own (no subclass): sizes, strides, offsets, version counters and autograd's history are
where they are on every device, and views of one storage share its memory.
"""

import functools
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .device import DEVICE_TYPE

if TYPE_CHECKING:
    import numpy as np

# The CPU's kernels of ops that change how a tensor lies on its storage, and touch no data, serve any device.
_METADATA_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@functools.cache
def numpy_dtype(dtype: torch.dtype) -> "np.dtype[Any]":
    """Return NumPy's dtype for one of torch's.

    Raises:
        TypeError: NumPy has none.
    """
    import numpy as np

    try:
        return np.dtype(str(dtype).removeprefix("torch."))
    except TypeError:
        raise TypeError(
            f"npy has no tensors of {dtype}: NumPy has no such dtype. Use torch.float16 or torch.float32."
        ) from None


def metadata_kernel(op: torch._ops.OpOverload) -> Any:
    """Return a kernel for an op that changes or makes a view, and touches no data."""
    return functools.partial(op.redispatch, _METADATA_KERNELS)


def new_tensor(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on memory of its own, which is not written."""
    import numpy as np

    numpy_dtype(dtype)
    elements = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if all(size) else 0
    return place(empty_tensor(dtype), np.empty(elements * dtype.itemsize, np.uint8), size, stride)


def empty_tensor(dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without elements."""
    tensor: torch.Tensor = torch._C._acc.create_empty_tensor((0,), dtype)
    return tensor


def place(tensor: torch.Tensor, data: Any, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Give a tensor a new storage, which owns the array of bytes `data`."""
    device = torch.device(DEVICE_TYPE, 0)
    storage = torch._C._construct_storage_from_data_pointer(data.ctypes.data, device, data.nbytes)
    storage.npy_data = data  # type: ignore[attr-defined]
    set_storage = metadata_kernel(torch.ops.aten.set_.source_Storage_storage_offset)
    placed: torch.Tensor = set_storage(tensor, storage, 0, size, stride)
    _arrays[torch._C._storage_id(placed)] = data  # type: ignore[attr-defined]
    return placed


_arrays: "weakref.WeakValueDictionary[int, np.ndarray[Any, Any]]" = weakref.WeakValueDictionary()
"""The array of each storage, by the storage's identity.

Kernels look it up here: to ask a weight for its storage makes an alias, through which it might be written unseen, so
polycast would drop the weight's cast at each op.
"""


def array(tensor: torch.Tensor) -> "np.ndarray[Any, Any]":
    """Return the array of a tensor: the same memory, so that what is written to one is read from the other.

    Raises:
        RuntimeError: the tensor is on another device.
    """
    import numpy as np

    if tensor.device.type != DEVICE_TYPE:
        raise RuntimeError(
            f"Expected all tensors to be on {DEVICE_TYPE}, but found one of shape {tuple(tensor.shape)} on "
            f"{tensor.device}. Move it with .to({DEVICE_TYPE!r})."
        )
    width = tensor.itemsize
    strides = [width * step for step in tensor.stride()]
    data, offset = _arrays[torch._C._storage_id(tensor)], width * tensor.storage_offset()  # type: ignore[attr-defined]
    values: np.ndarray[Any, Any] = np.ndarray(tensor.shape, numpy_dtype(tensor.dtype), data, offset, strides)
    return values


def from_array(values: Any) -> torch.Tensor:
    """Return a contiguous tensor of the values of an array or a NumPy scalar; it takes the array's memory if it can."""
    import numpy as np

    values = np.ascontiguousarray(values).reshape(np.shape(values))
    dtype: torch.dtype = getattr(torch, values.dtype.name)
    return place(empty_tensor(dtype), values.reshape(-1).view(np.uint8), values.shape, contiguous_strides(values.shape))


def contiguous_strides(size: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor."""
    return [math.prod(max(length, 1) for length in size[position + 1 :]) for position in range(len(size))]
