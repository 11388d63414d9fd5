"""What runs at the dispatcher's Autocast keys: put a backend's kernels in place, and give torch its own back."""

import threading
from collections.abc import Iterable

import torch

from .. import env
from ..backend import Backend
from ..policy import CastPolicy
from ..registry import registry
from .reference import Kernels

_installed: dict[str, Kernels] = {}
_lock = threading.RLock()


def install(device_type: str) -> None:
    """Put polycast's kernels in place for a device, also where the device cannot be used now.

    The first region for a device does this by itself. By hand it is of use for what enables autocast otherwise
    (torch.autocast, ``torch.set_autocast_enabled``) and for fake tensors of a device that is absent. It changes the
    kernels of the whole process; :func:`uninstall` gives torch its own back.

    Args:
        device_type: a device string that torch knows, such as ``"cuda"``.

    Raises:
        ValueError, RuntimeError: as :func:`polycast.get_backend`.

    Example:
        >>> import polycast
        >>> polycast.install("cpu")
        >>> polycast.uninstall("cpu")
    """
    kernels_of(registry.find(device_type))


def uninstall(device_type: str | None = None) -> None:
    """Take polycast's kernels away: torch has its own again, as if polycast had never been used.

    The next region for the device puts them back.

    Args:
        device_type: the device; None for all.

    Raises:
        ValueError, RuntimeError: `device_type` is not a device string that torch knows.
    """
    with _lock:
        names = list(_installed) if device_type is None else [registry.parse_device_type(device_type)]
        for name in names:
            kernels = _installed.pop(name, None)
            if kernels is not None:
                kernels.remove()


def kernels_of(backend: Backend, also: Iterable[str] = ()) -> Kernels:
    """Return a backend's kernels, putting in place what is not there yet: those of its table and of the ops `also`."""
    kernels = _installed.get(backend.device_type)
    if kernels is None or kernels.backend is not backend:
        with _lock:
            kernels = _installed.get(backend.device_type)
            if kernels is None or kernels.backend is not backend:
                env.engine()
                if kernels is not None:
                    kernels.remove()
                kernels = _installed[backend.device_type] = Kernels(backend)
    for name in also:
        if name not in kernels.ops:
            kernels.add(name, CastPolicy.PASSTHROUGH)
    return kernels


def torch_ops(device_type: str) -> frozenset[str]:
    """Return the ops that the running torch itself treats at a device's Autocast key, by their dispatcher names."""
    key = "Autocast" + torch._C._dispatch_key_for_device(device_type)
    kernels = _installed.get(device_type)
    return frozenset(
        name
        for name in torch._C._dispatch_get_all_op_names()
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        and not (kernels is not None and name in kernels.added)
    )


registry.on_change.append(uninstall)
