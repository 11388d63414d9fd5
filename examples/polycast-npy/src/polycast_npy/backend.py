"""The polycast backend of npy."""

from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from polycast.plugin import Availability, Backend, LowBitKernel, Recipe

from .device import numpy_availability
from .kernels import KERNELS
from .policies import POLICIES


class NpyBackend(Backend):
    """NumPy as a device. float16 is its only fast dtype, because NumPy has no bfloat16."""

    api = 1
    device_type = "npy"
    default_dtype = torch.float16
    policies = POLICIES
    kernels = KERNELS

    @override
    def supported_dtypes(self) -> Sequence[torch.dtype]:
        return (torch.float16,)

    @override
    def availability(self) -> Availability:
        return Availability(*numpy_availability())

    @override
    def recipe_availability(self, recipe: Recipe) -> Availability:
        return Availability(True) if recipe.kind == "int8" else super().recipe_availability(recipe)

    @override
    def low_bit_kernels(self, recipe: Recipe) -> Mapping[str, LowBitKernel]:
        if recipe.kind != "int8":
            return {}
        from .low_bit import Product  # it needs the plugin quantize, which has the recipe

        return Product(recipe.settings["scales"]).kernels()
