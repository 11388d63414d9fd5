"""Autocast for the CPU.

PYTEST_DONT_REWRITE: pytest, which finds its options in this distribution, has no assertion to rewrite here.
"""

import platform
from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from polycast import Availability, Backend, LowBitKernel, Recipe, hookimpl

from .instructions import missing_instructions
from .kernels import KERNELS
from .policies import POLICIES
from .processor import processor_details

_ALWAYS = Availability(True)


class CpuBackend(Backend):
    """The CPU, with torch's own op table; bfloat16 by default."""

    device_type = "cpu"
    default_dtype = torch.bfloat16
    policies = POLICIES
    kernels = KERNELS
    # For all x86 processors, whatever this one supports: a build may be shared.
    ops_in_cpp = ("polycast_cpu.native",) if platform.machine() in ("x86_64", "AMD64") else ()

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
        return processor_details()

    @override
    def recipe_availability(self, recipe: Recipe) -> Availability:
        if recipe.kind not in ("int4", "int8"):
            return super().recipe_availability(recipe)
        from .int8 import int8_availability  # few programs use recipes

        return int8_availability()

    @override
    def low_bit_kernels(self, recipe: Recipe) -> Mapping[str, LowBitKernel]:
        if recipe.kind == "fastest":
            from .few_rows import few_rows_kernels

            return few_rows_kernels()
        if recipe.kind == "int4":
            from .int4 import int4_kernels

            return int4_kernels(recipe)
        from .int8 import int8_kernels

        return int8_kernels(recipe.scales)


@hookimpl
def polycast_backend() -> Backend:
    """Return the backend of ``cpu``."""
    return CpuBackend()
