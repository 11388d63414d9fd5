"""Products in int8, for ``polycast.Int8()``: what a recipe asks of a device, in as few lines as it takes.

A weight is packed once, into signed bytes with a scale for each output feature. Activations are rounded to bytes at
each call, with a scale for each row or, as the recipe says, one for all. Sums are exact; what is rounded is what goes
in and what comes out. It saves no time here: NumPy has no product of integers that is faster than that of floats.
"""

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from typing_extensions import override

from polycast import LowBitKernel

from .tensors import array, from_array, numpy_dtype

_SMALLEST = 2.0**-110
"""What scales are made as if it were there, so that those of rows of zeros can be divided by."""


class Linear(LowBitKernel):
    """``aten::linear``: a weight [N, K], whose rows are the output features."""

    packing: Hashable = "rows are output features"

    def __init__(self, scales: str) -> None:
        self._axis = -1 if scales == "row" else None

    @override
    def declines(self, *args: Any) -> str | None:
        x, weight, bias = args
        reason = _misfit(x, weight, weight.shape)
        if reason is None and bias is not None and tuple(bias.shape) != tuple(weight.shape[:1]):
            return "the bias is not a vector of the output features"
        return reason

    @override
    def prepare(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        return _packed(array(weight))

    @override
    def run(self, prepared: tuple[torch.Tensor, ...], *args: Any) -> torch.Tensor:
        x, _, bias = args
        return _product(x, prepared, self._axis, bias)


class Mm(LowBitKernel):
    """``aten::mm``: a matrix by a weight [K, N], whose columns are the output features."""

    packing: Hashable = "columns are output features"

    def __init__(self, scales: str) -> None:
        self._axis = -1 if scales == "row" else None

    @override
    def declines(self, *args: Any) -> str | None:
        x, weight = args
        return "the sizes do not fit" if x.dim() != 2 else _misfit(x, weight, weight.shape[::-1])

    @override
    def prepare(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        return _packed(array(weight).T)

    @override
    def run(self, prepared: tuple[torch.Tensor, ...], *args: Any) -> torch.Tensor:
        return _product(args[0], prepared, self._axis)


def int8_kernels(scales: str) -> Mapping[str, LowBitKernel]:
    """Return the kernels of ``Int8(scales)``, by op."""
    return {"aten::linear": Linear(scales), "aten::mm": Mm(scales)}


def _misfit(x: torch.Tensor, weight: torch.Tensor, features: torch.Size) -> str | None:
    """Say why a product is not for these kernels, of tensors that may be fake: by their sizes alone."""
    if weight.dim() != 2:
        return "the weight is not a matrix"
    if x.dim() == 0 or x.shape[-1] != features[1]:
        return "the sizes do not fit"
    return "the weight has no elements" if weight.numel() == 0 else None


def _quantized(values: Any, axis: int | None) -> tuple[Any, Any]:
    """Return values as bytes, and the scales to multiply these with: along an axis, or one for all."""
    import numpy as np

    scales = np.maximum(np.abs(values).max(axis=axis, keepdims=True, initial=_SMALLEST), _SMALLEST) / 127
    return np.rint(values / scales).astype("int8"), scales


def _packed(weight: Any) -> tuple[torch.Tensor, ...] | None:
    """Return what an array [N, K] is packed into; None where a value of it is inf or nan."""
    import numpy as np

    if not np.isfinite(weight).all():
        return None
    codes, scales = _quantized(weight.astype("float32"), 1)
    return from_array(codes), from_array(scales[:, 0])


def _product(
    x: torch.Tensor, prepared: tuple[torch.Tensor, ...], axis: int | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the product of activations and a packed weight, in the fast dtype.

    Rows with inf or nan are computed apart, in floats, so that the others keep their scales.
    """
    import numpy as np

    codes, scales = (array(each) for each in prepared)
    rows = array(x).reshape(-1, codes.shape[1]).astype("float32")
    odd = ~np.isfinite(rows).all(axis=1)
    of_rows, scale = _quantized(np.where(odd[:, None], np.float32(0), rows), axis)
    with np.errstate(over="ignore", invalid="ignore"):
        # BLAS multiplies floats only. Those of float64 have 53 bits: sums of products of bytes are exact.
        product = (of_rows.astype("float64") @ codes.astype("float64").T) * scale * scales
        if odd.any():
            product[odd] = rows[odd] @ (codes * scales[:, None]).T
        if bias is not None:
            product = product + array(bias)
        fast = numpy_dtype(torch.get_autocast_dtype(x.device.type))
        return from_array(product.astype(fast).reshape(*x.shape[:-1], len(codes)))
