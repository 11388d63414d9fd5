"""Autocast for MTIA, Meta's accelerators."""

from collections.abc import Sequence

import torch
from typing_extensions import override

from polycast.plugin import STANDARD_POLICIES, Availability, Backend, hookimpl


class MtiaBackend(Backend):
    """MTIA, with torch's own op table; float16 by default."""

    device_type = "mtia"
    default_dtype = torch.float16
    policies = STANDARD_POLICIES

    @override
    def supported_dtypes(self) -> Sequence[torch.dtype]:
        return (torch.float16, torch.bfloat16)

    @override
    def availability(self) -> Availability:
        if torch.mtia.is_available():
            return Availability(True)
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != self.device_type:
            return Availability(False, f"torch {torch.__version__} was built without MTIA")
        return Availability(False, "no MTIA device is visible")


@hookimpl
def polycast_backend() -> Backend:
    """Return the backend of ``mtia``."""
    return MtiaBackend()
