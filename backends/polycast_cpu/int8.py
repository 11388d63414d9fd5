"""int8 matmuls and convolutions for recipes: activations are quantized at each call, weights once.

Each output feature of a weight has a scale. So has each row of the activations (each image of a convolution), or all
of them share one, depending on the recipe. Inputs are rounded to 255 levels; sums are exact, in 32 bits.

Rows of activations with inf or nan are computed separately, with the quantized weight, and do not change other rows. A
weight with inf or nan is not quantized.
"""

import functools
import math
import platform
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from typing_extensions import override

from polycast import Availability, LowBitKernel, LowBitMatmul, load_ops

_MOST_TERMS = 65536
"""Longer sums of products of unsigned and signed bytes may overflow 32 bits."""

_MOST_PADDED = 64
"""Images are not padded in memory to more than so many times their size."""

_NO_FIT = "the sizes do not fit"
_LONG_SUMS = f"its sums have more than {_MOST_TERMS} terms, which may not fit 32 bits"


@functools.cache
def int8_availability() -> Availability:
    """Return whether the processor multiplies int8 faster than float32, and the C++ ops are available."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    needed = "AVX2, or ATEN_CPU_CAPABILITY forbids it" if is_x86 else "dot products of int8"
    too_slow = Availability(False, f"this CPU has no {needed}: int8 would be slower than float32")
    is_arm = platform.machine() in ("aarch64", "arm64")
    if not (is_x86 or is_arm) or (is_x86 and torch.backends.cpu.get_cpu_capability() == "DEFAULT"):
        return too_slow  # without compiling
    loaded = load_ops("polycast_cpu.native")
    return loaded if not loaded or torch.ops.polycast_cpu.best_isa() > 0 else too_slow


class Product(LowBitMatmul):
    """The product of activations and a weight, with a scale for each row of the activations or one for all.

    Args:
        by_row: whether each row has a scale.
        isa: one of the instruction sets in ``torch.ops.polycast_cpu.isas()``; by default the best that
            ``ATEN_CPU_CAPABILITY`` allows. The results have the same bits by each of them.
    """

    equalizes = True

    def __init__(self, by_row: bool, isa: int | None = None) -> None:
        ops = torch.ops.polycast_cpu
        self._isa = ops.best_isa() if isa is None else isa
        self.operators = {
            "aten::linear": ops.int8_linear.default,
            "aten::matmul": ops.int8_matmul.default,
            "aten::mm": ops.int8_matmul.default,
            "aten::addmm": ops.int8_addmm.default,
        }
        self.constants = (by_row, self._isa)

    @override
    def unsupported_reason(self, x: torch.Tensor, size: Sequence[int], bias: torch.Tensor | None) -> str | None:
        return _LONG_SUMS if size[1] > _MOST_TERMS else None

    @override
    def prepack(self, weight: torch.Tensor, factors: torch.Tensor | None = None) -> tuple[torch.Tensor, ...] | None:
        return tuple(torch.ops.polycast_cpu.int8_pack(weight, factors, self._isa)) or None


class Conv2d(LowBitKernel):
    """``aten::conv2d`` without groups, with a scale for each image or one for all. Weights are [N, C, height, width].

    The padding is given as numbers or, for ``aten::conv2d.padding``, as ``"same"`` or ``"valid"``.
    """

    prepack_key: Hashable = "rows are output channels"

    def __init__(self, by_image: bool, isa: int | None = None, overload: str = "default") -> None:
        ops = torch.ops.polycast_cpu
        self._isa = ops.best_isa() if isa is None else isa
        self.operator = getattr(ops.int8_conv2d, overload)
        self.constants = (by_image, self._isa)

    @override
    def unsupported_reason(self, *args: Any) -> str | None:
        x, weight, bias, *steps, groups = args
        if groups != 1:
            return "the convolution has groups"
        if weight.dim() != 4 or x.dim() not in (3, 4) or x.shape[-3] != weight.shape[1]:
            return _NO_FIT
        if bias is not None and bias.shape != weight.shape[:1]:
            return "the bias is not a vector of the output channels"
        if 0 in weight.shape:
            return "the weight has no elements"
        if 0 in x.shape:
            return "the images have no elements"
        if weight.shape[1:].numel() > _MOST_TERMS:
            return _LONG_SUMS
        given = _steps(weight, *steps)
        if given is None or not all(map(_fits, x.shape[-2:], weight.shape[-2:], *given)):
            return _NO_FIT
        padded = math.prod(size + sum(padding) for size, padding in zip(x.shape[-2:], given[1], strict=True))
        if padded > _MOST_PADDED * x.shape[-2:].numel() + 2**16:  # the kernel writes the padded image
            return "the padding is much larger than the images"
        return None

    @override
    def prepack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        rows = weight.permute(0, 2, 3, 1).flatten(1)
        packed = torch.ops.polycast_cpu.int8_pack(rows, None, self._isa)
        return tuple(packed[:-1]) or None  # without the factors of an equalization


_Numbers: TypeAlias = Sequence[int]


def _steps(
    weight: torch.Tensor, stride: Any, padding: Any, dilation: Any
) -> tuple[_Numbers, Sequence[_Numbers], _Numbers] | None:
    """Return stride, padding (before and after) and dilation of each axis; None if torch rejects them."""
    strides, dilations = _pair(stride), _pair(dilation)
    if strides is None or dilations is None:
        return None
    if padding == "same" and all(step == 1 for step in strides):
        totals = [step * (size - 1) for step, size in zip(dilations, weight.shape[2:], strict=True)]
        return strides, [(total // 2, total - total // 2) for total in totals], dilations
    paddings = _pair(0 if padding == "valid" else padding)
    return None if paddings is None else (strides, [(size, size) for size in paddings], dilations)


def _pair(step: Any) -> _Numbers | None:
    """Return a number for each of two axes, given one or two; None if the argument is something else."""
    if isinstance(step, str):
        return None
    numbers = (step,) if isinstance(step, int) else step
    return numbers if len(numbers) == 2 else (*numbers, *numbers) if len(numbers) == 1 else None


def _fits(size: int, kernel: int, stride: int, padding: _Numbers, dilation: int) -> bool:
    """Return whether a kernel fits into a padded image along one axis."""
    return stride > 0 and dilation > 0 and min(padding) >= 0 and size + sum(padding) > dilation * (kernel - 1)


def int8_kernels(scales: str) -> Mapping[str, LowBitKernel]:
    """Return the kernels of ``Int8(scales)`` by op; none if int8 is not available."""
    if not int8_availability():
        return {}
    by_row = scales == "row"
    return {
        **Product(by_row).kernels(),
        "aten::conv2d": Conv2d(by_row),
        "aten::conv2d.padding": Conv2d(by_row, overload="padding"),
    }
