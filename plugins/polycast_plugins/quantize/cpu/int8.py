"""int8 matmuls and convolutions for recipes: activations are quantized at each call, weights once.

Each output feature of a weight has a scale. So has each row of the activations (each image of a convolution), or all
of them share one, depending on the recipe. Inputs are rounded to 255 levels; sums are exact, in 32 bits.

Rows of activations with inf or nan are computed separately, with the quantized weight, and do not change other rows. A
weight with inf or nan is not quantized.
"""

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from typing_extensions import override

from polycast.plugin import Availability, LowBitKernel, load_ops

from ..low_bit_matmul import LowBitMatmul
from .processors import is_arm, is_x86

MAX_TERMS = 65536
"""Longer sums of products of unsigned and signed bytes may overflow 32 bits."""

_MAX_PADDED = 64
"""Images are not padded in memory to more than so many times their size."""

_MIN_GROUP = 48
"""Narrower groups of a convolution, such as single channels, are not faster in int8."""

_NO_FIT = "the sizes do not fit"
_NARROW = f"its groups have fewer than {_MIN_GROUP} channels"
_LONG_SUMS = f"its sums have more than {MAX_TERMS} terms, which may not fit 32 bits"


@functools.cache
def int8_availability() -> Availability:
    """Return whether the processor multiplies int8 faster than float32, and the C++ ops are available."""
    needed = "AVX2, or ATEN_CPU_CAPABILITY forbids it" if is_x86() else "dot products of int8"
    too_slow = Availability(False, f"this CPU has no {needed}: int8 would be slower than float32")
    if not (is_x86() or is_arm()) or (is_x86() and torch.backends.cpu.get_cpu_capability() == "DEFAULT"):
        return too_slow  # without compiling
    loaded = load_ops("polycast_plugins.quantize.cpu.native")
    return loaded if not loaded or torch.ops.polycast_cpu.best_isa() > 0 else too_slow


class Int8Matmul(LowBitMatmul):
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
        return _LONG_SUMS if size[1] > MAX_TERMS else None

    @override
    def prepack(self, weight: torch.Tensor, factors: torch.Tensor | None = None) -> tuple[torch.Tensor, ...] | None:
        return tuple(torch.ops.polycast_cpu.int8_pack(weight, factors, self._isa)) or None


class Conv2d(LowBitKernel):
    """``aten::conv2d``, also in wide groups, with a scale for each image or one. Weights are [N, C, height, width].

    The padding is given as numbers or, for ``aten::conv2d.padding``, as ``"same"`` or ``"valid"``.
    """

    axes = 2
    op = "int8_conv2d"
    prepack_key: Hashable = "rows are output channels"

    def __init__(self, by_image: bool, isa: int | None = None, overload: str = "default") -> None:
        ops = torch.ops.polycast_cpu
        self._isa = ops.best_isa() if isa is None else isa
        self.operator = getattr(getattr(ops, self.op), overload)
        self.constants = (by_image, self._isa)

    @override
    def unsupported_reason(self, *args: Any) -> str | None:
        x, weight, bias, *steps, groups = args
        axes = self.axes
        if weight.dim() != axes + 2 or x.dim() not in (axes + 1, axes + 2) or groups < 1:
            return _NO_FIT
        if x.shape[-axes - 1] != weight.shape[1] * groups or weight.shape[0] % groups != 0:
            return _NO_FIT
        if groups > 1 and min(weight.shape[0] // groups, weight.shape[1]) < _MIN_GROUP:
            return _NARROW
        if bias is not None and bias.shape != weight.shape[:1]:
            return "the bias is not a vector of the output channels"
        if 0 in weight.shape:
            return "the weight has no elements"
        if 0 in x.shape:
            return "the images have no elements"
        if weight.shape[1:].numel() > MAX_TERMS:
            return _LONG_SUMS
        given, size = _steps(weight, *steps), x.shape[-axes:]
        if given is None or not all(map(_fits, size, weight.shape[2:], *given)):
            return _NO_FIT
        padded = math.prod(each + sum(padding) for each, padding in zip(size, given[1], strict=True))
        if padded > _MAX_PADDED * size.numel() + 2**16:  # the kernel writes the padded image
            return "the padding is much larger than the images"
        return None

    @override
    def prepack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        rows = weight.movedim(1, -1).flatten(1)
        packed = torch.ops.polycast_cpu.int8_pack(rows, None, self._isa)
        return tuple(packed[:-1]) or None  # without the factors of a calibration


class Conv1d(Conv2d):
    """``aten::conv1d``, in the same way: weights are [N, C, width]."""

    axes = 1
    op = "int8_conv1d"


_Numbers: TypeAlias = Sequence[int]


def _steps(
    weight: torch.Tensor, stride: Any, padding: Any, dilation: Any
) -> tuple[_Numbers, Sequence[_Numbers], _Numbers] | None:
    """Return stride, padding (before and after) and dilation of each axis; None if torch rejects them."""
    axes = weight.dim() - 2
    strides, dilations = _by_axis(stride, axes), _by_axis(dilation, axes)
    if strides is None or dilations is None:
        return None
    if padding == "same" and all(step == 1 for step in strides):
        totals = [step * (size - 1) for step, size in zip(dilations, weight.shape[2:], strict=True)]
        return strides, [(total // 2, total - total // 2) for total in totals], dilations
    paddings = _by_axis(0 if padding == "valid" else padding, axes)
    return None if paddings is None else (strides, [(size, size) for size in paddings], dilations)


def _by_axis(step: Any, axes: int) -> _Numbers | None:
    """Return a number for each axis, given one or all; None if the argument is something else."""
    if isinstance(step, str):
        return None
    numbers = (step,) if isinstance(step, int) else tuple(step)
    return numbers if len(numbers) == axes else numbers * axes if len(numbers) == 1 else None


def _fits(size: int, kernel: int, stride: int, padding: _Numbers, dilation: int) -> bool:
    """Return whether a kernel fits into a padded image along one axis."""
    return stride > 0 and dilation > 0 and min(padding) >= 0 and size + sum(padding) > dilation * (kernel - 1)


def int8_kernels(scales: str) -> Mapping[str, LowBitKernel]:
    """Return the kernels of ``Int8(scales)`` by op; none if int8 is not available."""
    if not int8_availability():
        return {}
    by_row = scales == "row"
    return {
        **Int8Matmul(by_row).kernels(),
        "aten::conv1d": Conv1d(by_row),
        "aten::conv1d.padding": Conv1d(by_row, overload="padding"),
        "aten::conv2d": Conv2d(by_row),
        "aten::conv2d.padding": Conv2d(by_row, overload="padding"),
    }
