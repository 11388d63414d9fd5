"""Autocast for the CPU."""

from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from polycast import Int4, Int8
from polycast.plugin import Availability, Backend, LowBitKernel, Recipe, hookimpl

from .few_rows import few_rows_availability, few_rows_kernels
from .instructions import is_arm, is_x86, missing_instructions
from .int4 import int4_kernels
from .int8 import int8_availability, int8_kernels
from .lookup import lookup_kernels
from .out_dtype_kernels import KERNELS
from .policies import op_table
from .processor import kernel_settings, processor_details

_ALWAYS = Availability(True)


class CpuBackend(Backend):
    """The CPU, with torch's own op table; bfloat16 by default."""

    device_type = "cpu"
    default_dtype = torch.bfloat16
    policies = op_table()
    kernels = KERNELS
    # For all x86 and Arm processors, whatever this one supports: a build may be shared.
    ops_in_cpp = ("polycast_backends.cpu.native",) if is_x86() or is_arm() else ()

    @override
    def supported_dtypes(self) -> Sequence[torch.dtype]:
        return (torch.bfloat16, torch.float16)

    @override
    def availability(self) -> Availability:
        return _ALWAYS

    @override
    def slow_reason(self, dtype: torch.dtype) -> str | None:
        return missing_instructions(dtype)

    @override
    def device_details(self) -> Mapping[str, str]:
        return {**processor_details(), **kernel_settings()}

    @override
    def recipe_availability(self, recipe: Recipe) -> Availability:
        return int8_availability() if isinstance(recipe, (Int8, Int4)) else super().recipe_availability(recipe)

    @override
    def low_bit_kernels(self, recipe: Recipe) -> Mapping[str, LowBitKernel]:
        if recipe.kind == "fastest":
            return {**few_rows_kernels(), **lookup_kernels()} if few_rows_availability() else {}
        if isinstance(recipe, Int4):
            return int4_kernels(recipe.group_size)
        return int8_kernels(recipe.scales) if isinstance(recipe, Int8) else {}


@hookimpl
def polycast_backend() -> Backend:
    """Return the backend of ``cpu``."""
    return CpuBackend()
