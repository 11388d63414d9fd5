"""``polycast run --wrap``: a region around each outermost call of a module."""

import functools
import threading
from typing import Any

import torch

from ..engine import state
from ..torch_internals.patcher import Patch
from .shim import Region


def wrap_modules(patch: Patch) -> None:
    """Run the outermost call of a module, on each thread, in a region, unless it is in one for the device."""
    assert Region.overrides is not None
    assert Region.overrides.wrap is not None
    device_type, dtype = Region.overrides.wrap
    call = torch.nn.Module.__call__
    inside = threading.local()

    @functools.wraps(call)
    def wrapped(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "one", False) or state.machine.nesting(device_type):
            return call(module, *args, **kwargs)
        inside.one = True
        try:
            with Region(device_type, dtype):
                return call(module, *args, **kwargs)
        finally:
            inside.one = False

    patch.replace(torch.nn.Module, "__call__", wrapped)
