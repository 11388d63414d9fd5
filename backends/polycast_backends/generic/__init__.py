"""Autocast for devices that no package has a backend for, by what their module in torch, ``torch.<device>``, says.

Where the package of the device has autocast kernels, these cast, as in ``torch.autocast``.
"""

from collections.abc import Callable, Sequence
from threading import Thread
from types import ModuleType

import torch
from typing_extensions import override

from polycast.plugin import STANDARD_POLICIES, Availability, Backend, hookimpl, torch_name

_LOST = "autocast kernels of a device without a plugin are replaced"
_key_of: Callable[[str], str] = torch_name("torch._C._dispatch_key_for_device", str, _LOST)
_ops_at: Callable[[str], list[str]] = torch_name(
    "torch._C._dispatch_get_registrations_for_dispatch_key", lambda key: [], _LOST
)


class GenericBackend(Backend):
    """A device with the dtypes that its module offers."""

    def __init__(self, device_type: str, module: ModuleType, dtypes: Sequence[torch.dtype]) -> None:
        self.device_type, self._module, self._dtypes = device_type, module, dtypes
        found: list[torch.dtype] = []  # torch's fast dtype on a new thread, where no region has set it
        thread = Thread(target=lambda: found.append(torch.get_autocast_dtype(device_type)))
        thread.start()
        thread.join()
        self.default_dtype = found[0] if found[0] in dtypes else dtypes[0]
        own = _ops_at(f"Autocast{_key_of(device_type)}")
        has_own = not STANDARD_POLICIES.keys().isdisjoint(own)
        self.policies = {} if has_own else STANDARD_POLICIES
        self.excluded_ops = dict.fromkeys(own, "the package of the device has a kernel of it") if has_own else {}

    @override
    def supported_dtypes(self) -> Sequence[torch.dtype]:
        return self._dtypes

    @override
    def availability(self) -> Availability:
        if not self._module.is_available():
            return Availability(False, f"torch.{self.device_type}.is_available() is False")
        text = (
            "no package has a backend for it, so polycast uses the op table of other accelerators, "
            f"STANDARD_POLICIES. `polycast new-backend {self.device_type}` writes a package with its own; "
            "POLYCAST_GENERIC=0 leaves the device out"
        )
        return Availability(True, text if self.policies else "")


@hookimpl
def polycast_backend(device_type: str) -> Backend | None:
    """Return a backend; None if the module does not say which dtypes it has, or whether the device is available."""
    try:
        module = torch.get_device_module(device_type)
        if hasattr(module, "get_amp_supported_dtype"):
            offered = module.get_amp_supported_dtype()
        else:
            has = torch.accelerator.get_device_capability(device_type)["supported_dtypes"]
            offered = [dtype for dtype in (torch.float16, torch.bfloat16) if dtype in has]
        dtypes = [dtype for dtype in dict.fromkeys(offered) if dtype.is_floating_point]
        is_served = callable(module.is_available) and bool(dtypes)
    except Exception:  # of code of any package
        return None
    return GenericBackend(device_type, module, dtypes) if is_served else None
