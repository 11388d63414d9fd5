"""Say which fast dtypes are slow on a device: by its profile if there is one, else by its backend."""

import torch

from polycast.policy.dtypes import FLOAT32, dtype_name
from polycast.registry.backend import Backend
from polycast.registry.checks import ask_slow_reason
from polycast.registry.registry import registry

from .device_profile import DeviceProfile
from .profile import find_ignoring_errors

_ROWS = (128, 1024)
"""Fewer rows are limited by memory, which any dtype of 16 bits needs less of."""
_SLOW = 1.1


def find_slow_reason(backend: Backend, dtype: torch.dtype) -> str | None:
    """Return why a fast dtype is slow on the device, as the end of a sentence; None if it is not, or unknown."""
    reason = ask_slow_reason(backend, dtype)
    ratios = _ratios(backend, dtype_name(dtype))
    if not ratios:
        return reason
    rows = max(ratios, key=ratios.__getitem__)
    if ratios[rows] <= _SLOW:
        return None
    return reason or f"matrix products of {rows} rows take {ratios[rows]:.2g} of float32's time"


def _ratios(backend: Backend, way: str) -> dict[int, float]:
    """Return the times of linear layers relative to float32, by rows; without noisy ones."""
    profile = _profile_of(backend)
    linears = [each for each in profile.measurements if each.op == "linear"] if profile is not None else []
    noisy = {each.rows for each in linears if each.noisy and each.way in (way, FLOAT32)}
    measured = {each.rows for each in linears if each.way == way} - noisy
    found = {rows: profile.ratio("linear", rows, way) for rows in _ROWS if rows in measured and profile is not None}
    return {rows: ratio for rows, ratio in found.items() if ratio is not None}


def _profile_of(backend: Backend) -> DeviceProfile | None:
    if registry.ready.get(backend.device_type) is not backend:
        return None
    found = find_ignoring_errors(backend.device_type)
    return None if found is None or found.is_noisy else found
