"""Autocast for Maia, Microsoft's accelerators."""

from collections.abc import Sequence

import torch
from typing_extensions import override

from polycast.plugin import STANDARD_POLICIES, Availability, Backend, hookimpl


class MaiaBackend(Backend):
    """Maia, with torch's own op table; bfloat16 by default."""

    device_type = "maia"
    default_dtype = torch.bfloat16
    policies = STANDARD_POLICIES

    @override
    def supported_dtypes(self) -> Sequence[torch.dtype]:
        return (torch.bfloat16, torch.float16)

    @override
    def availability(self) -> Availability:
        # torch has the device's name and keys, but the module is in the package of its driver.
        module = getattr(torch, "maia", None)
        if module is None:
            return Availability(False, "torch.maia is missing: import the package of the Maia driver first")
        if module.is_available():
            return Availability(True)
        return Availability(False, "no MAIA device is visible")


@hookimpl
def polycast_backend() -> Backend:
    """Return the backend of ``maia``."""
    return MaiaBackend()
