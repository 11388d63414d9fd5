"""The cost of computing a product in one way, in seconds, by a device's profile.

A call takes a time linear in the size of the weight, interpolated between the sizes of the profile. Large and depthwise
convolutions, and the backward of attention, take a time linear in their multiplications.
Converting an argument takes a time that grows with its elements.
"""

import functools
import math

from .cases import ATTENTION_BACKWARD
from .device_profile import DeviceProfile, curves_of
from .measurement import FLOAT32

CAST = "cast"
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
    seconds = None if elements <= 0 else profile.seconds(CAST, elements, way)
    part, most = _CALL_FROM_PYTHON
    return 0.0 if seconds is None else seconds - min(part * (profile.seconds(CAST, 1, way) or 0.0), most)


def seconds_to_cast_weight(profile: DeviceProfile, way: str, elements: int) -> float:
    """Return the seconds of a float32 weight's conversion, which reads it from memory.

    The profile has the times of conversions from and to a processor's cache.
    """
    read = 4 * elements / profile.bandwidth if profile.bandwidth else 0.0
    return 0.0 if elements <= 0 else max(seconds_to_cast(profile, way, elements), read)
