"""Copies, between npy and the CPU and within npy, with casts."""

from typing import Any

import numpy as np
import torch

from ..device import DEVICE_TYPE
from ..tensors import array


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy a tensor to another; at least one of them is on npy."""
    if source.device.type == target.device.type == DEVICE_TYPE:
        with np.errstate(all="ignore"):  # what does not fit in float16 is infinite there
            np.copyto(array(target), array(source), casting="unsafe")
    elif target.device.type == DEVICE_TYPE:
        # The CPU casts, for it has dtypes that NumPy lacks.
        np.copyto(array(target), source.detach().to("cpu", target.dtype).resolve_conj().resolve_neg().numpy())
    else:
        target.copy_(torch.from_numpy(array(source).copy()))
    return target


def item(tensor: torch.Tensor) -> Any:
    """Return the value of a tensor with one element, as Python has it."""
    return array(tensor).item()


KERNELS = {"_copy_from": copy_from, "_local_scalar_dense": item}
