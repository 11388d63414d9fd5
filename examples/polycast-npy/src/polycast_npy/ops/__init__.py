"""The kernels of npy: tables from op to function, and what puts them at torch's dispatch key PrivateUse1.

An op that torch composes of others needs no kernel. Of most others one overload is enough, the one with ``out``: torch
makes the tensor for the result, with the shape and dtype that it computes for every device, and derives the functional
and the in-place overload.
"""

import torch

from . import (
    convolution,
    copies,
    creation,
    indexing,
    losses,
    matrix,
    normalization,
    pointwise,
    pooling,
    random,
    reductions,
    scaling,
    views,
)
from .adapter import ArrayKernel, find

_ON_TENSORS = (creation, views, copies, random, scaling)
_ON_ARRAYS = (pointwise, reductions, matrix, indexing, losses, normalization, convolution, pooling)


def register() -> torch.library.Library:
    """Register the kernels; they are removed when the returned objects are deleted."""
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")  # type: ignore[no-untyped-call]
    for module in _ON_TENSORS:
        for name, function in module.KERNELS.items():
            library.impl(name, function)  # type: ignore[no-untyped-call]
    for module in _ON_ARRAYS:
        for name, function in module.KERNELS.items():
            library.impl(name, ArrayKernel(find(name), function))  # type: ignore[no-untyped-call]
    return library
