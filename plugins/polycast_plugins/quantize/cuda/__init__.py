"""Kernels for float8 on CUDA."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from typing_extensions import override

from polycast.plugin import Availability, Extension, LowBitKernel, hookimpl

if TYPE_CHECKING:  # a plain region needs no recipe
    from polycast.plugin import Recipe


class CudaKernels(Extension):
    """Kernels for float8. They are imported when the recipe is first used."""

    device_type = "cuda"

    @override
    def recipe_availability(self, recipe: "Recipe") -> Availability:
        if recipe.kind != "float8":
            return super().recipe_availability(recipe)
        from .float8 import float8_availability

        return float8_availability(recipe.settings["scales"])

    @override
    def low_bit_kernels(self, recipe: "Recipe") -> Mapping[str, LowBitKernel]:
        if recipe.kind != "float8":
            return {}
        from .float8 import float8_kernels

        return float8_kernels(recipe.settings["scales"])


@hookimpl
def polycast_extension() -> Extension:
    """Return what this adds to ``cuda``."""
    return CudaKernels()
