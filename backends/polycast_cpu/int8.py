"""Products in int8, for recipes: activations are quantized at each call, weights once.

Each output feature of a weight has a scale, and so has each row of the activations (each image, for a convolution), or
all of them together, as the recipe says. Sums are exact, in 32 bits; what is rounded is what goes in, to 255 levels,
and what comes out.

Rows of activations with inf or nan are computed apart: they come to what inf and nan come to with the quantized weight,
and the rows beside them to what they come to without. A weight with inf or nan is not quantized.
"""

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from polycast import Availability, LowBitKernel, LowBitProduct, load_ops

_MOST_TERMS = 65536
"""Longer sums of products of unsigned and signed bytes may not fit 32 bits."""

_NO_FIT = "the sizes do not fit"
_LONG_SUMS = f"its sums have more than {_MOST_TERMS} terms, which may not fit 32 bits"


@functools.cache
def int8_availability() -> Availability:
    """Say whether the processor multiplies int8 faster than bfloat16, and the ops for it can be built."""
    if not torch.cpu._is_vnni_supported():
        return Availability(False, "this CPU has no AVX512-VNNI: int8 would be slower than bfloat16")
    return load_ops("polycast_cpu.native")


class Product(LowBitProduct):
    """Activations by a weight, with a scale for each row of the activations or one for all."""

    takes_batches = True

    def __init__(self, by_row: bool, isa: int | None = None) -> None:
        ops = torch.ops.polycast_cpu
        self._by_row = by_row
        self._isa = ops.best_isa() if isa is None else isa
        self._pack = ops.int8_pack.default
        self._linear = ops.int8_linear.default

    @override
    def declines(self, x: torch.Tensor, size: Sequence[int], bias: torch.Tensor | None) -> str | None:
        return _LONG_SUMS if size[1] > _MOST_TERMS else None

    @override
    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        return tuple(self._pack(weight, self._isa)) or None

    @override
    def multiply(
        self, x: torch.Tensor, packed: tuple[torch.Tensor, ...], bias: torch.Tensor | None, alpha: float
    ) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        result: torch.Tensor = self._linear(x, *packed, bias, alpha, self._by_row, dtype, self._isa)
        return result


class Conv2d(LowBitKernel):
    """``aten::conv2d`` without groups: a weight [N, C, height, width]; a scale for each image, or one for all."""

    packing: Hashable = "rows are output channels"

    def __init__(self, by_image: bool, isa: int | None = None) -> None:
        ops = torch.ops.polycast_cpu
        self._by_image = by_image
        self._isa = ops.best_isa() if isa is None else isa
        self._pack = ops.int8_pack.default
        self._convolve = ops.int8_conv2d.default

    @override
    def declines(self, *args: Any) -> str | None:
        x, weight, bias, *steps, groups = args
        if groups != 1:
            return "the convolution has groups"
        if weight.dim() != 4 or x.dim() not in (3, 4) or x.shape[-3] != weight.shape[1]:
            return _NO_FIT
        if bias is not None and bias.shape != weight.shape[:1]:
            return "the bias is not a vector of the output channels"
        if 0 in weight.shape:
            return "the weight has no elements"
        if weight.shape[1:].numel() > _MOST_TERMS:
            return _LONG_SUMS
        for axis in (0, 1):
            stride, padding, dilation = (_pair(step)[axis] for step in steps)
            reach = dilation * (weight.shape[2 + axis] - 1) + 1
            if stride < 1 or padding < 0 or dilation < 1 or x.shape[axis - 2] + 2 * padding < reach:
                return _NO_FIT
        return None

    @override
    def prepare(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        return tuple(self._pack(weight.permute(0, 2, 3, 1).flatten(1), self._isa)) or None

    @override
    def run(self, prepared: tuple[torch.Tensor, ...], *args: Any) -> torch.Tensor:
        x, weight, bias, *steps, _ = args
        images = x if x.dim() == 4 else x.unsqueeze(0)
        dtype = torch.get_autocast_dtype("cpu")
        stride, padding, dilation = map(_pair, steps)
        result: torch.Tensor = self._convolve(
            images, weight, *prepared, bias, stride, padding, dilation, self._by_image, dtype, self._isa
        )
        return result if x.dim() == 4 else result.squeeze(0)


def _pair(step: Any) -> Sequence[int]:
    """Return one number for each of two axes, of which a call may give one for both."""
    numbers = (step,) if isinstance(step, int) else step
    return numbers if len(numbers) == 2 else (*numbers, *numbers)


def int8_kernels(scales: str) -> Mapping[str, LowBitKernel]:
    """Return the kernels of ``Int8(scales)``, by op; none where int8 is not available."""
    if not int8_availability():
        return {}
    by_row = scales == "row"
    return {**Product(by_row).kernels(), "aten::conv2d": Conv2d(by_row)}
