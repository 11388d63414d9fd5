"""Interpolate between measurements, in the logarithms of their sizes."""

import math
from collections.abc import Mapping, Sequence


def interpolated(curve: Mapping[int, float], at: int) -> float:
    """Return a value interpolated in the logarithm of its ascending keys; beyond them the nearest."""
    low, high = _neighbours(tuple(curve), at)
    if low == high:
        return curve[low]
    part = math.log(at / low) / math.log(high / low)
    return curve[low] + part * (curve[high] - curve[low])


def interpolated_time(curve: Mapping[int, float], at: int) -> float:
    """Return a time interpolated on logarithmic scales; beyond the largest key it is proportional to the key."""
    largest = max(curve)
    if at > largest:
        return curve[largest] * at / largest
    if at in curve:
        return curve[at]
    return math.exp(interpolated({key: math.log(seconds) for key, seconds in curve.items()}, at))


def _neighbours(keys: Sequence[int], at: int) -> tuple[int, int]:
    """Return the nearest keys on both sides; both are the nearest one if there are none, or the key itself."""
    below = [key for key in keys if key <= at]
    above = [key for key in keys if key >= at]
    low = max(below, default=keys[0])
    return low, min(above, default=keys[-1]) if low <= at else low
