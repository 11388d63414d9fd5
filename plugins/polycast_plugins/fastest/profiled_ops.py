"""``op_seconds``: how long ops take in a fast dtype and in float32, by the profile of a device."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from .choose_way import Way, name_of, seconds_by_way
from .profile import find_profile
from .workloads import workload_of

OpSeconds: TypeAlias = Callable[[Any, Sequence[Any], Mapping[str, Any]], tuple[float, float] | None]


def op_seconds(device_type: str, dtype: torch.dtype) -> OpSeconds | None:
    """Return a function that tells how long calls of ops take; None if the device has no profile.

    Nothing is measured.

    Args:
        device_type: the device.
        dtype: the fast dtype.

    Returns:
        A function of an overload and the arguments and keyword arguments of a call, which may be fake. It returns the
        seconds in the fast dtype and in float32; None for an op that is no matmul, or that the profile does not have.
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
