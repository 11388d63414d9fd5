"""Say whether a fast dtype is slow on a device, by its profile if there is one."""

import torch

from polycast.plugin import dtype_name

from .device_profile import DeviceProfile
from .profile import find_profile

_ROWS = (128, 1024)
"""Fewer rows are limited by memory, which any dtype of 16 bits needs less of."""
_SHOWN_ROWS = (1, 128)
_SLOW = 1.1


def slow_reason(device_type: str, dtype: torch.dtype, reason: str | None) -> str | None:
    """Return why a fast dtype is slow on the device, as the end of a sentence; None if it is not, or unknown.

    Nothing is measured.

    Args:
        device_type: the device.
        dtype: the fast dtype.
        reason: why it is slow, as far as known without a profile; or None.
    """
    profile = find_profile(device_type)
    if profile is None:
        return reason and f"{reason} (`polycast profile {device_type}` measures how much)"
    way = dtype_name(dtype)
    ratios = {} if profile.is_noisy else _ratios(profile, way)
    slowest = max(ratios, key=ratios.__getitem__, default=0)
    if ratios and ratios[slowest] <= _SLOW:
        return None
    if reason is None:
        return f"matrix products of {slowest} rows take {ratios[slowest]:.2g} of float32's time" if ratios else None
    shown = {rows: profile.ratio("linear", rows, way) for rows in _SHOWN_ROWS}
    times = [f"{each:.2g} for {rows:,} row{'s' * (rows > 1)}" for rows, each in shown.items() if each is not None]
    measured = f" (time of linear layers relative to float32: {' and '.join(times)})" if times else ""
    return f"{reason}{measured}"


def _ratios(profile: DeviceProfile, way: str) -> dict[int, float]:
    """Return the times of linear layers relative to float32, by rows; without noisy ones."""
    linears = [each for each in profile.measurements if each.op == "linear"]
    noisy = {each.rows for each in linears if each.noisy and each.way in (way, "float32")}
    measured = {each.rows for each in linears if each.way == way} - noisy
    found = {rows: profile.ratio("linear", rows, way) for rows in _ROWS if rows in measured}
    return {rows: ratio for rows, ratio in found.items() if ratio is not None}
