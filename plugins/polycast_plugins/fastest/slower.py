"""Whether a recipe's kernel is slower than the fast dtype, by the device's profile if there is one."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from polycast.plugin import dtype_name

from .choose_way import Way, bucket, seconds_by_way
from .cost import seconds_to_cast
from .device_profile import DeviceProfile
from .profile import find
from .workloads import Workload, workload_of

_MARGIN = 1.1
"""A kernel is slower if it takes more than this many times the fast dtype's time: profiles are inexact."""


def slower_reason(device_type: str, kind: str, op: str, args: Sequence[Any]) -> str | None:
    """Return how much slower than the fast dtype a call is, by the device's profile; None if it is not slower.

    Also None if there is no profile, or a noisy one: this measures nothing.

    Args:
        device_type: the device.
        kind: the recipe's, by which profiles name its times.
        op: by its name in the dispatcher.
        args: its arguments, which may be fake.
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
