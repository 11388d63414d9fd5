"""Estimate from a device's profile the time of an op, and whether a recipe or a fast dtype is slow; measure nothing."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from polycast.plugin import dtype_name

from .choose_way import Way, bucket, name_of, seconds_by_way, seconds_to_cast
from .device_profile import DeviceProfile
from .profile import find, find_profile
from .workloads import Workload, workload_of

OpSeconds: TypeAlias = Callable[[Any, Sequence[Any], Mapping[str, Any]], tuple[float, float] | None]
_MARGIN = 1.1
"""A kernel is slower if it takes more than this many times the fast dtype's time: profiles are inexact."""
_ROWS = (128, 1024)
"""Fewer rows are limited by memory, which any dtype of 16 bits needs less of."""
_SHOWN_ROWS = (1, 128)
_SLOW = 1.1


def op_seconds(device_type: str, dtype: torch.dtype) -> OpSeconds | None:
    """Return a function that tells how long calls of ops take; None if the device has no profile.

    Nothing is measured. The arguments of the call may be fake. The function returns the seconds in the fast dtype and
    in float32; None for an op that is no matmul, or that the profile does not have.
    """
    profile = find_profile(device_type)
    if profile is None:
        return None
    ways = {way: name_of(way, dtype) for way in (Way.FAST, Way.FLOAT32)}

    def seconds(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[float, float] | None:
        others = op._schema.arguments[len(args) :]
        name, values = op.name(), [*args, *(kwargs.get(each.name, each.default_value) for each in others)]
        if name == "aten::convolution":
            is_transposed = values[6]
            if is_transposed:
                return None
            name, values = "aten::conv2d", [*values[:6], values[8]]
        workload = workload_of(name, values)
        found = {} if workload is None else seconds_by_way(profile, workload, ways)
        return (found[Way.FAST], found[Way.FLOAT32]) if len(found) == len(ways) else None

    return seconds


def slower_reason(device_type: str, kind: str, op: str, args: Sequence[Any]) -> str | None:
    """Return how much slower than the fast dtype a call is, by the device's profile; None if it is not slower.

    Also None if there is no profile, or a noisy one: this measures nothing. The arguments may be fake.
    """
    profile = find(device_type)
    workload = None if profile is None else workload_of(op, args)
    if profile is None or workload is None:
        return None
    rows = args[1] if op == "aten::addmm" else args[0]
    converted = 0 if rows.dtype is not torch.float32 else workload.rows * workload.inner
    dtype = dtype_name(torch.get_autocast_dtype(device_type))
    return _reason(profile, kind, dtype, Workload(workload.op, *map(bucket, workload[1:])), bucket(converted))


@functools.lru_cache(maxsize=4096)
def _reason(profile: DeviceProfile, kind: str, dtype: str, workload: Workload, converted: int) -> str | None:
    seconds = seconds_by_way(profile, workload, {Way.FAST: dtype, Way.KERNEL: kind})
    if len(seconds) < 2 or profile.is_noisy:
        return None
    own, fast = seconds[Way.KERNEL], seconds[Way.FAST] + seconds_to_cast(profile, f"to {dtype}", converted)
    return f"{kind} takes {own / fast:.2g} of {dtype}'s time, by the profile" if own > _MARGIN * fast else None


def slow_reason(device_type: str, dtype: torch.dtype, reason: str | None) -> str | None:
    """Return why a fast dtype is slow on the device, as the end of a sentence; None if it is not, or unknown.

    Nothing is measured. `reason` is why, as far as known without a profile.
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
