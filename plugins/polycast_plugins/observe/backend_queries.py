"""Ask backends and profiles about the devices of an observation; errors of plugins are ignored."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

import polycast
from polycast.plugin import Backend, check, disable_autocast, find_slow_dtype, get_backend

from .recorder import MatmulRow


def find_backend(device: str) -> Backend | None:
    """Return the backend of a device; None if it has none, or a broken one. Then torch's own autocast may have run."""
    try:
        return get_backend(device)
    except RuntimeError:
        return None


def why_not_enabled(device: str, dtype: torch.dtype) -> str:
    """Return why a region cannot be enabled; empty if it can, so that the program disabled it."""
    backend = find_backend(device)
    if backend is None:
        return ""
    if not (answer := check(backend)):
        return f"{device} is not available: {answer.reason.rstrip('.')}"
    answer = check(backend, dtype)
    return "" if answer else f"{dtype} is not supported: {answer.reason.rstrip('.')}"


def slow_reasons(devices: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return by device and dtype, as ``"cpu bfloat16"``, why the backend says that a fast dtype is slow there."""
    found = {}
    for device, names in devices.items():
        backend = find_backend(device)
        if backend is None:
            continue
        for name in names:
            dtype = getattr(torch, name)
            reason = _slow_reason(backend, dtype)
            if reason and find_slow_dtype(backend, dtype) is not None:  # a plugin may know better
                found[f"{device} {name}"] = reason
    return found


def _slow_reason(backend: Backend, dtype: torch.dtype) -> str | None:
    try:
        with disable_autocast():
            return backend.slow_reason(dtype)
    except (Exception, SystemExit):  # some libraries exit if they find no device
        return None


def _profile_of(device: str) -> Any:
    find_profile = getattr(polycast, "find_profile", None)  # of the plugin fastest, without which there are no profiles
    return None if find_profile is None else find_profile(device)


class DeviceProfiles:
    """The profiles of the devices of a run.

    Args:
        devices: the device types of its regions.
    """

    def __init__(self, devices: Iterable[str]) -> None:
        self._found = {device: _profile_of(device) for device in devices}

    def seconds(self, matmuls: MatmulRow, device: str | None) -> dict[str, float]:
        """Return the seconds of matmuls in each way that the profile of their device has; empty without a profile.

        For None, as in a backward pass, the profile is that of the only device of the run.
        """
        if device is None and len(self._found) == 1:
            (device,) = self._found
        profile = None if device is None else self._found.get(device)
        if profile is None:
            return {}
        size = max(1, round(matmuls.flops / (2 * matmuls.rows * matmuls.calls)))
        times = {way: profile.seconds(matmuls.kind, matmuls.rows, way, size) for way in profile.ways(matmuls.kind)}
        return {way: matmuls.calls * seconds for way, seconds in times.items() if seconds is not None}
