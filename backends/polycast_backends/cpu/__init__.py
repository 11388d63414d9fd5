"""Autocast for the CPU."""

from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from polycast.plugin import Availability, Backend, hookimpl

from .instructions import missing_instructions
from .missing_kernels import missing_kernels
from .out_dtype_kernels import KERNELS
from .policies import ADDED_OPS, POLICIES

_ALWAYS = Availability(True)


class CpuBackend(Backend):
    """The CPU, with torch's op table; bfloat16 by default."""

    device_type = "cpu"
    default_dtype = torch.bfloat16
    policies = POLICIES
    added_ops = ADDED_OPS
    kernels = KERNELS
    is_verified = True
    missing_kernels = missing_kernels()

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
        from .processor import kernel_settings, processor_details

        return {**processor_details(), **kernel_settings()}


@hookimpl
def polycast_backend() -> Backend:
    """Return the backend of ``cpu``."""
    return CpuBackend()
