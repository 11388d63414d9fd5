"""Choose the way to compute a call from its metadata and a device's profile: pure functions.

Sizes are rounded to powers of two first, so that calls of about the same size are computed in the same way.
A call takes a time linear in the size of the weight, interpolated between the sizes of the profile. Large and depthwise
convolutions, and the backward of attention, take a time linear in their multiplications.
Converting an argument takes a time that grows with its elements.
"""

import functools
import math
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import torch

from polycast.plugin import dtype_name

from .cases import ATTENTION_BACKWARD, CONVOLUTIONS
from .device_profile import DeviceProfile, curves_of
from .measurement import FLOAT32, PREEMPTED
from .workloads import ENCODER_LAYER, Workload

MARGIN = 0.92
"""Use another way than the fast dtype's only if it takes less than this fraction of its time: smaller gains are within
the error of a profile, which has few sizes."""
_MARGINS = {ENCODER_LAYER: 1.0}
"""Other margins, by op. In a region, an encoder layer also looks up the casts of its weights, which the profile does
not time, so any gain counts."""
_OF_FLOAT32_INPUT = 1.2
"""With a float32 input, an encoder layer in a region takes at least this many times the profile's time: autocast casts
query, key and value separately, so the fused attention does not see that they are one tensor."""

NO_FAST_KERNEL = "the device has no kernel for it in the fast dtype"
_CALL_FROM_PYTHON = 0.5, 2e-6
"""The part of the time of converting one element that is Python's call, and the most seconds that this is: on a device
that queues calls, it is a small part. Conversions inside of ops do not take it."""
_OF_WORK = ("conv2d", "depthwise_conv2d", ATTENTION_BACKWARD)
"""The ops whose time is linear in their multiplications."""
_OF_WEIGHTS = ("linear", "matmul", "encoder_layer")
"""The ops that read a weight from memory."""
_WIDTHS = {FLOAT32: 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.5}
"""The bytes of an element of the weight by way; none for ways of other names."""
_READ_FROM_MEMORY = 2**18
"""The elements of the smallest weight that is taken to be read from memory. Models of smaller ones fit in a cache."""


class Way(Enum):
    """A way to compute a product whose result has the fast dtype."""

    FAST = "fast"
    """torch's kernel for the fast dtype, with the weight's cached cast: the ordinary path."""
    KERNEL = "kernel"
    """The backend's own kernel for the fast dtype: of an op with a weight, with its cached cast, or of an elementwise
    function."""
    FLOAT32_KERNEL = "float32 kernel"
    """The same kernel, with the float32 weight as it is."""
    FLOAT32 = "float32"
    """torch's float32 kernel: the weight as it is, the activations cast to float32, the result to the fast dtype."""


def name_of(way: Way, dtype: torch.dtype) -> str:
    """Return the name of a way as profiles have it, given the fast dtype."""
    fast = dtype_name(dtype)
    return {Way.FAST: fast, Way.KERNEL: f"{fast} kernel"}.get(way, way.value)


def dtype_of(way: Way, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a way without a kernel of the backend computes in, given the fast dtype."""
    return torch.float32 if way is Way.FLOAT32 else dtype


class ChosenWay(NamedTuple):
    """The way that is chosen for a call, and why."""

    way: Way
    reason: str


class Conversions(NamedTuple):
    """The elements of a call's arguments that each way converts.

    Attributes:
        narrow: the elements that are not float32, which the way float32 converts.
        wide: the float32 elements of activations, which the fast dtype's way converts. Kernels of backends take any.
        weight: the float32 elements of weights whose casts will not be found in a cache, which the fast dtype's way and
            its kernels convert.
        more_to_fast: the tensors that the fast dtype's way converts besides one activation and one weight. Converting
            each takes at least the time of a call.
        more_to_float32: the tensors that the way float32 converts besides one.
    """

    narrow: int
    wide: int
    weight: int
    more_to_fast: int = 0
    more_to_float32: int = 0


def choose(
    profile: DeviceProfile, dtype: torch.dtype, workload: Workload, conversions: Conversions, kernels: tuple[Way, ...]
) -> ChosenWay:
    """Choose the way to compute a call that autograd does not record; `kernels` are the backend's that support it."""
    rounded = Workload(workload.op, *map(bucket, workload[1:]))
    narrow, wide, weight = map(bucket, conversions[:3])
    return _choose(profile, dtype, rounded, conversions._replace(narrow=narrow, wide=wide, weight=weight), kernels)


def bucket(size: int) -> int:
    """Return the power of two that is the nearest to a size, in its logarithm; 0 for 0."""
    return 0 if size <= 0 else 1 << round(math.log2(size))


@functools.lru_cache(maxsize=4096)
def _choose(
    profile: DeviceProfile, dtype: torch.dtype, workload: Workload, conversions: Conversions, kernels: tuple[Way, ...]
) -> ChosenWay:
    fast = dtype_name(dtype)
    ways = {way: name_of(way, dtype) for way in (Way.FAST, *kernels, Way.FLOAT32)}
    seconds = seconds_by_way(profile, workload, ways)
    if Way.FAST not in seconds:
        if Way.FLOAT32 in seconds and is_unsupported(profile, workload.op, fast):
            return ChosenWay(Way.FLOAT32, NO_FAST_KERNEL)
        return ChosenWay(Way.FAST, f"the profile has no {fast} {workload.op}")
    if workload.op == ENCODER_LAYER and conversions.wide >= workload.result:
        seconds[Way.FAST] *= _OF_FLOAT32_INPUT
    of_weight = seconds_to_cast_weight(profile, f"to {fast}", conversions.weight)
    converting = {
        Way.FAST: of_weight
        + seconds_to_cast(profile, f"to {fast}", conversions.wide)
        + seconds_to_cast(profile, f"to {fast}", 1) * conversions.more_to_fast,
        Way.KERNEL: of_weight,
        Way.FLOAT32_KERNEL: 0.0,
        Way.FLOAT32: seconds_to_cast(profile, f"from {fast}", conversions.narrow)
        + seconds_to_cast(profile, f"to {fast}", workload.result)
        + seconds_to_cast(profile, f"from {fast}", 1) * conversions.more_to_float32,
    }
    total = {way: each + converting[way] for way, each in seconds.items()}
    ratios = {way: each / total[Way.FAST] for way, each in total.items()}
    way = min(ratios, key=lambda each: ratios[each])
    margin = _MARGINS.get(workload.op, MARGIN)
    if ratios[way] < margin:
        return ChosenWay(way, f"{ways[way]} takes {ratios[way]:.2f} of {fast}'s time")
    others = ", ".join(f"{ways[each]} {ratio:.2f}" for each, ratio in ratios.items() if each is not Way.FAST)
    slower = f"no other way takes less than {margin} of {fast}'s time ({others})"
    return ChosenWay(Way.FAST, slower if others else f"only {fast} was measured")


def seconds_by_way(profile: DeviceProfile, workload: Workload, ways: Mapping[Way, str]) -> dict[Way, float]:
    """Return the seconds of a workload by way, without conversions; of the ways that the profile has.

    All are of one op: the workload's own, or one like it if that was not measured.
    """
    for op in (workload.op, *_ALIKE.get(workload.op, ())):
        of_op = {way: seconds_of(profile, op, name, workload.rows, workload.size) for way, name in ways.items()}
        seconds = {way: each for way, each in of_op.items() if each is not None}
        if Way.FAST in seconds or is_unsupported(profile, op, ways[Way.FAST]):
            return seconds
    return {}


def is_unsupported(profile: DeviceProfile, op: str, way: str) -> bool:
    """Return whether an op raised in a way whenever it was measured."""
    return not curves_of(profile, op, way) and any(
        (each.op, each.way) == (op, way) and each.reason != PREEMPTED for each in profile.omissions
    )


_ALIKE = {
    "matmul": ("linear",),
    "linear": ("matmul",),
    "bmm": ("matmul", "linear"),
    **{op: ("conv2d",) for op in CONVOLUTIONS if op != "conv2d"},
}


def seconds_of(profile: DeviceProfile, op: str, way: str, rows: int, size: int) -> float | None:
    """Return the seconds of a product; None if it was not measured in this way.

    A large weight is read from memory, unless the model is called again at once. A profile times it in the processor's
    cache, so the time to read it is combined with that by `hypot`: between the maximum, as if reading and
    computing overlap, and the sum.
    """
    seconds = _seconds_in_cache(profile, op, way, rows, size)
    return None if seconds is None else math.hypot(seconds, _seconds_to_read(profile, op, way, size))


def _seconds_to_read(profile: DeviceProfile, op: str, way: str, size: int) -> float:
    width = _WIDTHS.get(way.removesuffix(" kernel"), 0)
    if op not in _OF_WEIGHTS or size < _READ_FROM_MEMORY or not profile.bandwidth:
        return 0.0
    return width * size / profile.bandwidth


def _seconds_in_cache(profile: DeviceProfile, op: str, way: str, rows: int, size: int) -> float | None:
    if op in _OF_WORK:
        return _seconds_of_work(profile, op, way, rows * size)
    points = [(each, profile.seconds(op, rows, way, each)) for each in curves_of(profile, op, way)]
    known = [(each, seconds) for each, seconds in points if seconds is not None]
    if not known:
        return None
    # Work beyond the profile is not faster by the multiplication than any that was measured.
    least = rows * size * min(seconds / work for work, seconds in _seconds_by_work(profile, op, way))
    if len(known) == 1:
        measured, seconds = known[0]
        return max(seconds * max(size / measured, 0.01), least)
    # The neighbours, or the two at the end that is nearer. A call is never faster than half of the fastest measured.
    after = next((at for at in range(1, len(known) - 1) if known[at][0] >= size), len(known) - 1)
    (low, of_low), (high, of_high) = known[after - 1], known[after]
    seconds = of_low + max(of_high - of_low, 0.0) * (size - low) / (high - low)
    return max(seconds, min(each for _, each in known) / 2, least)


def _seconds_of_work(profile: DeviceProfile, op: str, way: str, work: int) -> float | None:
    """Return the seconds of a convolution or an attention's backward by its number of multiplications alone.

    Few sizes are measured. Below the least measured work the time is constant, and above the most in proportion.
    """
    known = _seconds_by_work(profile, op, way)
    if not known:
        return None
    after = next((at for at, (each, _) in enumerate(known) if each >= work), len(known))
    if after == 0:
        return known[0][1]
    less, seconds = known[after - 1]
    if after == len(known):
        return seconds * work / less
    more, longer = known[after]
    return seconds + (longer - seconds) * (work - less) / (more - less)


@functools.lru_cache(maxsize=256)
def _seconds_by_work(profile: DeviceProfile, op: str, way: str) -> tuple[tuple[int, float], ...]:
    """Return multiplications and their seconds, ascending; of equal multiplications, the least seconds."""
    found: dict[int, float] = {}
    for size, curve in curves_of(profile, op, way).items():
        for rows, seconds in curve.items():
            found[rows * size] = min(seconds, found.get(rows * size, math.inf))
    return tuple(sorted(found.items()))


def seconds_to_cast(profile: DeviceProfile, way: str, elements: int) -> float:
    """Return the seconds of a conversion, such as ``"to bfloat16"``; 0 for no elements.

    A profile without conversions makes them free.
    """
    seconds = None if elements <= 0 else profile.seconds("cast", elements, way)
    part, most = _CALL_FROM_PYTHON
    return 0.0 if seconds is None else seconds - min(part * (profile.seconds("cast", 1, way) or 0.0), most)


def seconds_to_cast_weight(profile: DeviceProfile, way: str, elements: int) -> float:
    """Return the seconds of a float32 weight's conversion, which reads it from memory.

    The profile has the times of conversions from and to a processor's cache.
    """
    read = 4 * elements / profile.bandwidth if profile.bandwidth else 0.0
    return 0.0 if elements <= 0 else max(seconds_to_cast(profile, way, elements), read)
