"""Multiply a few rows by a weight in the fast dtype or float32, for the recipe "fastest".

torch's kernels are made for many rows. With one row, as in decoding, the time goes into reading the weight: these
kernels read its cast once, in the layout that it has, convert it to float32 in registers and round the result once. So
they are at least as accurate as torch's, but not bitwise equal. A row has the same bits alone and among others.

They also take a float32 weight, so small layers need no cast.
"""

import functools
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from polycast.plugin import Availability, LowBitKernel, load_ops

from ..low_bit_matmul import LowBitMatmul
from .processors import is_x86

_MAX_ROWS = 8
"""The kernels read the weight once for up to so many rows. For more, torch's are faster."""
_MANY_ROWS = f"there are more than {_MAX_ROWS} rows"


class FewRows(LowBitKernel):
    """The kernel of an op, with the checks of a `LowBitMatmul`."""

    uses_cast = True
    takes_float32 = True

    def __init__(self, checked: LowBitKernel) -> None:
        self._checked = checked
        self.weight = checked.weight
        self.operator = checked.operator
        self.constants = checked.constants

    @override
    def unsupported_reason(self, *args: Any) -> str | None:
        reason = self._checked.unsupported_reason(*args)
        if reason is not None:
            return reason
        weight = args[self.weight]
        # The cast of a float32 weight is dense in any case.
        if weight.dtype is torch.float32 or 1 in weight.stride() or 1 in weight.shape:
            return None
        return "neither the rows nor the columns of the weight are dense"


class FewRowsMatmul(LowBitMatmul):
    """The ops that multiply by a weight's cast.

    Args:
        simd: 0 for plain C++, 1 for AVX2, 2 for AVX512; by default the best that the processor has and that
            ``ATEN_CPU_CAPABILITY`` allows.
    """

    def __init__(self, simd: int | None = None) -> None:
        ops = torch.ops.polycast_cpu
        self.operators = {
            "aten::linear": ops.few_rows_linear.default,
            "aten::matmul": ops.few_rows_matmul.default,
            "aten::mm": ops.few_rows_matmul.default,
            "aten::addmm": ops.few_rows_addmm.default,
        }
        self.constants = (ops.best_simd() if simd is None else simd,)

    @override
    def unsupported_reason(self, x: torch.Tensor, size: Sequence[int], bias: torch.Tensor | None) -> str | None:
        # Size.numel(), or the number in the text, would specialize compiled code to it.
        return None if math.prod(x.shape[:-1]) <= _MAX_ROWS else _MANY_ROWS

    @override
    def kernels(self) -> Mapping[str, LowBitKernel]:
        return {op: FewRows(kernel) for op, kernel in super().kernels().items()}


@functools.cache
def few_rows_availability() -> Availability:
    """Return whether the C++ ops are available and, if not, why."""
    if not is_x86():
        return Availability(False, f"there are kernels for x86 processors only, not for {platform.machine()}")
    return load_ops("polycast_plugins.quantize.cpu.native")


def few_rows_kernels() -> Mapping[str, LowBitKernel]:
    """Return the kernels by op. The C++ ops must be available."""
    return FewRowsMatmul().kernels()
