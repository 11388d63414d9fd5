"""Autocast for the CPU.

PYTEST_DONT_REWRITE: pytest, which finds its options in this distribution, has no assertion to rewrite here.
"""

from collections.abc import Sequence

import torch
from typing_extensions import override

from polycast import Availability, Backend, hookimpl

from .instructions import missing_instructions
from .kernels import KERNELS
from .policies import POLICIES

_ALWAYS = Availability(True)


class CpuBackend(Backend):
    """The CPU, with torch's own op table; bfloat16 by default."""

    device_type = "cpu"
    default_dtype = torch.bfloat16
    policies = POLICIES
    kernels = KERNELS

    @override
    def supported_dtypes(self) -> Sequence[torch.dtype]:
        return (torch.bfloat16, torch.float16)

    @override
    def availability(self) -> Availability:
        return _ALWAYS

    @override
    def emulates(self, dtype: torch.dtype) -> str | None:
        return missing_instructions(dtype)


@hookimpl
def polycast_backend() -> Backend:
    """Return the backend of ``cpu``."""
    return CpuBackend()
