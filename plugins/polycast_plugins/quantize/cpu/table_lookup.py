"""Functions of one number in the fast dtype, for the recipe "fastest": read from a table of all their results.

A bfloat16 or float16 number has 65,536 values. torch's kernels convert each number to float32, compute the function and
round; a table that these kernels have filled gives the same bits by a read.
"""

from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from polycast.plugin import LowBitKernel

_FEWEST, _FEWEST_RECORDED = 1024, 16384
"""For fewer elements, torch's kernel takes less time than the call of the operator, or than its autograd node."""


class TableLookup(LowBitKernel):
    """The kernel of a function. Its input takes the place of a weight, since it is in the fast dtype already."""

    weight = 0
    uses_cast = True

    def __init__(self, operator: Any) -> None:
        self.operator = operator

    @override
    def unsupported_reason(self, *args: Any) -> str | None:
        x = args[0]
        if x.dtype not in (torch.bfloat16, torch.float16):
            return "its input is neither bfloat16 nor float16"
        fewest = _FEWEST_RECORDED if x.requires_grad and torch.is_grad_enabled() else _FEWEST
        if x.numel() < fewest:
            return f"it has fewer than {fewest} elements"
        if not torch.ops.aten.is_non_overlapping_and_dense(x):
            return "its elements are not dense in memory"
        return None


def lookup_kernels() -> Mapping[str, LowBitKernel]:
    """Return the kernels by op. The C++ ops must be available."""
    ops = torch.ops.polycast_cpu
    return {f"aten::{name}": TableLookup(getattr(ops, f"lookup_{name}").default) for name in _FUNCTIONS}


_FUNCTIONS = ("gelu", "mish", "sigmoid", "silu", "tanh")
