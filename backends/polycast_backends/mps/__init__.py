"""Autocast for the GPUs of Macs, which torch calls mps."""

from collections.abc import Sequence

import torch
from typing_extensions import override

from polycast.plugin import Availability, Backend, hookimpl

from .policies import POLICIES


class MpsBackend(Backend):
    """MPS, with torch's own op table; float16 by default, bfloat16 from macOS 14 on."""

    device_type = "mps"
    default_dtype = torch.float16
    policies = POLICIES

    @override
    def supported_dtypes(self) -> Sequence[torch.dtype]:
        if torch.backends.mps.is_available() and not torch.backends.mps.is_macos_or_newer(14, 0):
            return (torch.float16,)
        return (torch.float16, torch.bfloat16)

    @override
    def availability(self) -> Availability:
        if torch.backends.mps.is_available():
            return Availability(True)
        if not torch.backends.mps.is_built():
            return Availability(False, f"torch {torch.__version__} was built without MPS")
        return Availability(False, "no MPS device is visible")

    @override
    def dtype_availability(self, dtype: torch.dtype) -> Availability:
        answer = super().dtype_availability(dtype)
        if dtype is torch.bfloat16 and not answer:
            return Availability(False, f"bfloat16 needs macOS 14; {answer.reason}")
        return answer


@hookimpl
def polycast_backend() -> Backend:
    """Return the backend of ``mps``."""
    return MpsBackend()
