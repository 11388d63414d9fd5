"""Autocast for CUDA (and ROCm, which torch calls cuda too)."""

from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from polycast.plugin import Availability, Backend, hookimpl

from .out_dtype_kernels import KERNELS
from .policies import EXCLUDED_OPS, POLICIES
from .settings import kernel_settings


class CudaBackend(Backend):
    """CUDA, with torch's own op table; float16 by default, bfloat16 where the GPU has it."""

    device_type = "cuda"
    default_dtype = torch.float16
    policies = POLICIES
    kernels = KERNELS
    excluded_ops = EXCLUDED_OPS

    @override
    def supported_dtypes(self) -> Sequence[torch.dtype]:
        if torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
            return (torch.float16,)
        return (torch.float16, torch.bfloat16)

    @override
    def availability(self) -> Availability:
        if torch.cuda.is_available():
            return Availability(True)
        if torch.version.cuda is None and torch.version.hip is None:
            return Availability(False, f"torch {torch.__version__} was built without CUDA")
        return Availability(False, "no CUDA device is visible")

    @override
    def dtype_availability(self, dtype: torch.dtype) -> Availability:
        answer = super().dtype_availability(dtype)
        if dtype is torch.bfloat16 and not answer:
            return Availability(False, f"this GPU has no bfloat16; {answer.reason}")
        return answer

    @override
    def device_details(self) -> Mapping[str, str]:
        return {**super().device_details(), **kernel_settings()}

    if not hasattr(torch.Stream, "is_capturing"):  # before torch 2.12

        @override
        def is_capturing(self) -> bool:
            initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            return initialized and torch.cuda.is_current_stream_capturing()


@hookimpl
def polycast_backend() -> Backend:
    """Return the backend of ``cuda``."""
    return CudaBackend()
