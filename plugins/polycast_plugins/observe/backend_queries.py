"""Ask the backends about the devices of an observation; errors of plugins are ignored."""

from collections.abc import Iterable, Mapping

import torch

from polycast.plugin import Backend, check_availability, find_slow_reason
from polycast.region.resolve import why_disabled
from polycast.registry.checks import ask_slow_reason
from polycast.registry.registry import registry


def find_backend(device: str) -> Backend | None:
    """Return the backend of a device; None if it has none, or a broken one. Then torch's own autocast may have run."""
    try:
        return registry.find(device)
    except RuntimeError:
        return None


def why_not_enabled(device: str, dtype: torch.dtype) -> str:
    """Return why a region cannot be enabled; empty if it can, so that the program disabled it."""
    backend = find_backend(device)
    if backend is None:
        return ""
    refusal = why_disabled(backend, dtype, check_availability(backend)) or ""
    return refusal.replace("Disabling autocast.", "").replace("\n", "").strip().rstrip(".")


def slow_reasons(devices: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return by device and dtype, as ``"cpu bfloat16"``, why the backend says that a fast dtype is slow there."""
    found = {}
    for device, names in devices.items():
        backend = find_backend(device)
        if backend is None:
            continue
        for name in names:
            dtype = getattr(torch, name)
            reason = ask_slow_reason(backend, dtype)
            if reason is not None and find_slow_reason(backend, dtype) is not None:  # a plugin may know better
                found[f"{device} {name}"] = reason
    return found
