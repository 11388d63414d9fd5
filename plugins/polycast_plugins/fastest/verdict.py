"""`verdict`: what to do on a device, by the times of its profile. Noisy times are left out."""

import math
from collections.abc import Collection, Mapping

import torch

from .choose_way import MARGIN
from .device_profile import DeviceProfile, curves_of
from .measurement import FLOAT32

_MANY, _ONE = (128, 1024), (1,)
"""The rows of training and of inference by batches, and those of decoding."""
_FASTEST = "the recipe fastest"


def verdict(profile: DeviceProfile) -> list[str]:
    """Return a sentence that says what to do, and the figures that it follows from: a line for each kind of work."""
    many, one = (_speeds(profile, "linear", rows) for rows in (_MANY, _ONE))
    dtypes = {way: speed for way, speed in many.items() if _is_dtype(way) and way != FLOAT32}
    if not dtypes:
        return ["no fast dtype was measured without noise; --table shows the times"]
    fast = _best(dtypes)
    of_ops = {op: _speeds(profile, op, _MANY).get(fast, 1.0) for op in {each.op: 0 for each in profile.measurements}}
    if dtypes[fast] * MARGIN > 1:
        training, slower = "a plain region", {op: speed for op, speed in of_ops.items() if speed < MARGIN}
    else:
        training, slower = _FASTEST if max(of_ops.values()) * MARGIN > 1 else FLOAT32, {}
    uses = {
        "decoding": _use(_best(one), fast) if len(one) > 1 else "not measured",
        "inference of many rows": _use(_best(many), fast),
        "training": training,
    }
    figures = {
        "Linear layers of 1 row, times as fast as float32": one,
        "Of 128 rows or more": many,
        f'Slower than float32 in {fast}, unless recipe="fastest"': slower,
    }
    return [
        "; ".join([_headline(fast, dtypes[fast]), *(f"{work}: {use}" for work, use in uses.items())]),
        *(
            f"{what}: {', '.join(f'{name} {each[name]:.2g}' for name in sorted(each, key=lambda name: -each[name]))}"
            for what, each in figures.items()
            if each
        ),
    ]


def _headline(fast: str, speed: float) -> str:
    if MARGIN <= speed <= 1 / MARGIN:
        return f"{fast} is as fast as {FLOAT32} here"
    quick, slow, times = (fast, FLOAT32, speed) if speed > 1 else (FLOAT32, fast, 1 / speed)
    return f"{quick} is {times:.2g} times as fast as {slow} here"


def _use(way: str, fast: str) -> str:
    """Return what runs a way: `fast` is the dtype of a plain region."""
    if way.endswith(" kernel"):
        return _FASTEST
    return "a plain region" if way == fast else f"a region in {way}" if _is_dtype(way) and way != FLOAT32 else way


def _speeds(profile: DeviceProfile, op: str, rows: Collection[int]) -> dict[str, float]:
    """Return how many times as fast as float32 each way is with the largest weight; empty if float32 is not known."""
    noisy = {(each.way, each.size, each.rows) for each in profile.measurements if each.op == op and each.noisy}
    found = {}
    for way in profile.ways(op):
        size, curve = max(curves_of(profile, op, way).items())
        base = curves_of(profile, op, FLOAT32).get(size, {})
        counts = [
            count
            for count in rows
            if count in curve and count in base and not noisy & {(way, size, count), (FLOAT32, size, count)}
        ]
        if counts:
            found[way] = math.prod(base[count] / curve[count] for count in counts) ** (1 / len(counts))
    return found


def _is_dtype(way: str) -> bool:
    return bool(getattr(getattr(torch, way, None), "is_floating_point", False))


def _best(speeds: Mapping[str, float]) -> str:
    """Return the fastest way; of those that differ by no more than the error of a profile, the first."""
    best, *others = speeds
    for way in others:
        if speeds[way] * MARGIN > speeds[best]:
            best = way
    return best
