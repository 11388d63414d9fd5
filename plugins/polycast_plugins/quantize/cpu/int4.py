"""4-bit matmuls for recipes: weights are packed once into 4 bits, activations are quantized to 8 bits at each call.

The terms of a product are divided into chunks of 256 terms, and these into groups of `group_size`; a chunk is a group
if groups are larger. A weight's value is the product of

- its level, from -8 to 7,
- the multiplier of its output feature and group, an integer from -15 to 15,
- the scale of its output feature and chunk, in bfloat16.

Activations have a scale for each row and chunk, and 255 levels. Sums of a chunk are exact, in 32 bits; they are scaled
and added in float32, chunk by chunk, and the result is rounded once. So a row has the same bits alone and among others.

Rows of activations with inf or nan are computed separately, with the quantized weight, and do not change other rows. A
weight with inf or nan is not quantized.
"""

from collections.abc import Hashable, Mapping, Sequence

import torch
from typing_extensions import override

from polycast.plugin import LowBitKernel

from ..compensation import compensate_errors
from ..low_bit_matmul import LowBitMatmul
from .int4_levels import CHUNK, Int4Levels
from .int8 import MAX_TERMS, int8_availability


class Int4Matmul(LowBitMatmul):
    """The product of activations and a weight in groups of so many terms, a multiple of 16."""

    equalizes = True

    def __init__(self, group_size: int, isa: int | None = None) -> None:
        ops = torch.ops.polycast_cpu
        self._group_size = group_size
        self.levels = f"int4, groups of {group_size}"
        self.operators = {
            "aten::linear": ops.int4_linear.default,
            "aten::matmul": ops.int4_matmul.default,
            "aten::mm": ops.int4_matmul.default,
            "aten::addmm": ops.int4_addmm.default,
        }
        self.constants = (group_size, ops.best_isa() if isa is None else isa)

    @override
    def unsupported_reason(self, x: torch.Tensor, size: Sequence[int], bias: torch.Tensor | None) -> str | None:
        if size[1] > MAX_TERMS:
            return f"its sums have more than {MAX_TERMS} terms, which may not fit 32 bits"
        return None

    @override
    def prepack(
        self,
        weight: torch.Tensor,
        factors: torch.Tensor | None = None,
        levels: tuple[torch.Tensor, ...] | None = None,
    ) -> tuple[torch.Tensor, ...] | None:
        if levels is not None:
            return tuple(torch.ops.polycast_cpu.int4_pack_levels(*levels, factors, weight.shape[1], self._group_size))
        return tuple(torch.ops.polycast_cpu.int4_pack(weight, factors, self._group_size)) or None

    @override
    def compensate(self, weight: torch.Tensor, moments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        levels = Int4Levels(weight.shape[0], weight.shape[1], self._group_size, weight.device)
        compensate_errors(weight, moments, CHUNK, levels.round_column)
        return levels.tensors()

    @override
    def kernels(self) -> Mapping[str, LowBitKernel]:
        kernels = super().kernels()
        for kernel in kernels.values():
            key: Hashable = (kernel.prepack_key, self._group_size)
            kernel.prepack_key = key
        return kernels


def int4_kernels(group_size: int) -> Mapping[str, LowBitKernel]:
    """Return the kernels of ``Int4(group_size)`` by op; none if they are not available."""
    return Int4Matmul(group_size).kernels() if int8_availability() else {}
