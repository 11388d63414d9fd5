"""Int8 matrix products for ``polycast.Int8()``: a minimal kernel of a recipe.

A weight is packed once, into signed bytes with a scale for each output feature. Activations are rounded to bytes at
each call, with a scale for each row or, as the recipe says, one for all. Sums are exact; what is rounded is what goes
in and what comes out. It saves no time here: NumPy has no product of integers that is faster than that of floats.
"""

from typing import Any

import torch
from typing_extensions import override

from polycast_plugins.quantize import LowBitMatmul

from .tensors import array, from_array, numpy_dtype

_SMALLEST = 2.0**-110
"""The smallest magnitude that scales are computed from, so that scales of zero rows are not zero."""


class Product(LowBitMatmul):
    """The product of activations and a weight, with a scale for each row of the activations or one for all."""

    takes_batches = True

    def __init__(self, scales: str) -> None:
        self._axis = -1 if scales == "row" else None

    @override
    def prepack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        import numpy as np

        values = array(weight)
        if not np.isfinite(values).all():
            return None
        codes, scales = _quantized(values.astype("float32"), 1)
        return from_array(codes), from_array(scales[:, 0])

    @override
    def multiply(
        self, x: torch.Tensor, packed: tuple[torch.Tensor, ...], bias: torch.Tensor | None, alpha: float
    ) -> torch.Tensor:
        """Return the product. Rows with inf or nan are computed in floats, so that the others keep their scales."""
        import numpy as np

        codes, scales = (array(each) for each in packed)
        rows = array(x).reshape(-1, codes.shape[1]).astype("float32")
        odd = ~np.isfinite(rows).all(axis=1)
        of_rows, scale = _quantized(np.where(odd[:, None], np.float32(0), rows), self._axis)
        with np.errstate(over="ignore", invalid="ignore"):
            # BLAS multiplies floats only. Those of float64 have 53 bits: sums of products of bytes are exact.
            product = (of_rows.astype("float64") @ codes.astype("float64").T) * scale * scales
            if odd.any():
                product[odd] = rows[odd] @ (codes * scales[:, None]).T
            product = alpha * product + (0 if bias is None else array(bias))
            fast = numpy_dtype(torch.get_autocast_dtype(x.device.type))
            return from_array(product.astype(fast).reshape(*x.shape[:-1], len(codes)))


def _quantized(values: Any, axis: int | None) -> tuple[Any, Any]:
    """Return quantized values and their scales: along an axis, or one for all."""
    import numpy as np

    scales = np.maximum(np.abs(values).max(axis=axis, keepdims=True, initial=_SMALLEST), _SMALLEST) / 127
    return np.rint(values / scales).astype("int8"), scales
