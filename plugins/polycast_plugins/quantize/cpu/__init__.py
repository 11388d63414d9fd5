"""Kernels for recipes on the CPU: int8, int4, and for a few rows in the fast dtype."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from typing_extensions import override

from polycast.plugin import Availability, Extension, LowBitKernel, hookimpl

from .processors import is_arm, is_x86

if TYPE_CHECKING:  # a plain region needs no recipe
    from polycast.plugin import Recipe


class CpuKernels(Extension):
    """Kernels for int8, int4 and "fastest", with ops in C++. They are imported when a recipe is first used."""

    device_type = "cpu"
    # For all x86 and Arm processors, whatever this one supports: a build may be shared.
    ops_in_cpp = ("polycast_plugins.quantize.cpu.native",) if is_x86() or is_arm() else ()

    @override
    def recipe_availability(self, recipe: "Recipe") -> Availability:
        if recipe.kind not in ("int8", "int4"):
            return super().recipe_availability(recipe)
        from .int8 import int8_availability

        return int8_availability()

    @override
    def low_bit_kernels(self, recipe: "Recipe") -> Mapping[str, LowBitKernel]:
        from .few_rows import few_rows_availability, few_rows_kernels
        from .int4 import int4_kernels
        from .int8 import int8_kernels
        from .table_lookup import lookup_kernels

        settings = recipe.settings
        if recipe.kind == "fastest":
            return {**few_rows_kernels(), **lookup_kernels()} if few_rows_availability() else {}
        if recipe.kind == "int4":
            return int4_kernels(settings["group_size"])
        return int8_kernels(settings["scales"]) if recipe.kind == "int8" else {}


@hookimpl
def polycast_extension() -> Extension:
    """Return what this adds to ``cpu``."""
    return CpuKernels()
