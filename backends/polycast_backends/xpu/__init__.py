"""Autocast for Intel GPUs, which torch calls xpu."""

from collections.abc import Sequence

import torch
from typing_extensions import override

from polycast.plugin import STANDARD_POLICIES, Availability, Backend, hookimpl

from .out_dtype_kernels import KERNELS


class XpuBackend(Backend):
    """XPU, with torch's own op table; float16 by default, bfloat16 where the GPU has it."""

    device_type = "xpu"
    default_dtype = torch.float16
    policies = STANDARD_POLICIES
    kernels = KERNELS

    @override
    def supported_dtypes(self) -> Sequence[torch.dtype]:
        if torch.xpu.is_available() and not torch.xpu.is_bf16_supported():
            return (torch.float16,)
        return (torch.float16, torch.bfloat16)

    @override
    def availability(self) -> Availability:
        if torch.xpu.is_available():
            return Availability(True)
        if torch.version.xpu is None:
            return Availability(False, f"torch {torch.__version__} was built without XPU")
        return Availability(False, "no XPU device is visible")

    @override
    def dtype_availability(self, dtype: torch.dtype) -> Availability:
        answer = super().dtype_availability(dtype)
        if dtype is torch.bfloat16 and not answer:
            return Availability(False, f"this GPU has no bfloat16; {answer.reason}")
        return answer


@hookimpl
def polycast_backend() -> Backend:
    """Return the backend of ``xpu``."""
    return XpuBackend()
