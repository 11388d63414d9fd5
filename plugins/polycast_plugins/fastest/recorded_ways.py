"""Choose the ways to compute a product that autograd records: its forward, and each of its gradients."""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from polycast.plugin import dtype_name

from .cases import ATTENTION, ATTENTION_BACKWARD, CONVOLUTIONS
from .choose_way import (
    MARGIN,
    NO_FAST_KERNEL,
    Way,
    bucket,
    is_unsupported,
    name_of,
    seconds_by_way,
    seconds_to_cast,
    seconds_to_cast_weight,
)
from .device_profile import DeviceProfile
from .workloads import Workload

_FUNCTION_SECONDS = 150e-6
"""The time of an autograd function in Python, forward and backward."""
_RECOMPUTING_FUNCTION_SECONDS = 300e-6
"""One that computes an attention again in the backward."""
_NATIVE_FUNCTION_SECONDS = 5e-6
"""The same in C++, for attention and, in float32, for `_NATIVE_OPS`."""
_NATIVE_OPS = ("linear", "matmul", *CONVOLUTIONS)
"""By the profile's names. An estimate: `aten::matmul` and overloads with padding by name run in Python."""


class RecordedOperands(NamedTuple):
    """The operands of a recorded product, the activation and the weight or second matrix.

    Attributes:
        first, second: their numbers of elements.
        first_is_wide, second_is_wide: whether they are float32, and not weights.
        is_weight: whether the second is a weight, which is float32.
        is_cached: whether the cast of the weight will be found in a cache.
        first_needed, second_needed: whether their gradients are needed.
        is_recomputed: whether the backward computes the product again; of an attention.
    """

    first: int
    second: int
    first_is_wide: bool
    second_is_wide: bool
    is_weight: bool
    is_cached: bool
    first_needed: bool
    second_needed: bool
    is_recomputed: bool = False


class Ways(NamedTuple):
    """The ways to compute the forward, and the gradients of the first and the second operand; and why.

    Attributes:
        forward, first, second: the ways. Of an attention, `first` is that of the whole backward.
        reason: why.
        is_float32: whether the forward and the gradients that are needed are all computed in float32.
    """

    forward: Way
    first: Way
    second: Way
    reason: str
    is_float32: bool = False

    @property
    def are_all_fast(self) -> bool:
        """Whether this is what the fast dtype computes, without polycast's autograd function."""
        return {self.forward, self.first, self.second} == {Way.FAST}


ALL_FAST = Ways(Way.FAST, Way.FAST, Way.FAST, "")
ALL_FLOAT32 = Ways(Way.FLOAT32, Way.FLOAT32, Way.FLOAT32, NO_FAST_KERNEL, is_float32=True)


def choose_recorded(profile: DeviceProfile, dtype: torch.dtype, workload: Workload, operands: RecordedOperands) -> Ways:
    """Choose the ways to compute a recorded product and its gradients."""
    rounded = Workload(workload.op, *map(bucket, workload[1:]))
    sizes = operands._replace(first=bucket(operands.first), second=bucket(operands.second))
    return _choose(profile, dtype, rounded, sizes)


@functools.lru_cache(maxsize=4096)
def _choose(profile: DeviceProfile, dtype: torch.dtype, workload: Workload, operands: RecordedOperands) -> Ways:
    costs = _Costs(profile, dtype, workload, operands)
    if not costs.are_known:
        if is_unsupported(profile, workload.op, dtype_name(dtype)):
            return ALL_FLOAT32
        return ALL_FAST._replace(reason=f"the profile has no {dtype_name(dtype)} or float32 {workload.op}")
    both = (Way.FAST, Way.FLOAT32)
    first_choices = both if operands.first_needed else (Way.FAST,)
    second_choices = both if operands.second_needed else (Way.FAST,)
    one_way = workload.inner == 0 and operands.first_needed and operands.second_needed  # one op has both gradients
    total = {
        ways: costs.of(*ways)
        for ways in itertools.product(both, first_choices, second_choices)
        if not one_way or ways[1] is ways[2]
    }
    fast = total[Way.FAST, Way.FAST, Way.FAST]
    best = min(total, key=lambda ways: total[ways])
    if total[best] >= MARGIN * fast:
        best = (Way.FAST, Way.FAST, Way.FAST)
    names = [name_of(way, dtype) for way in best]
    needed = [name_of(way, dtype) for way in _of_needed(best, operands)]
    backward = " and ".join(dict.fromkeys(needed)) or "none"
    ratio = NO_FAST_KERNEL if math.isinf(fast) else f"{total[best] / fast:.2f} of {dtype_name(dtype)}'s time"
    reason = f"forward in {names[0]}, backward in {backward}: {ratio}"
    return Ways(*best, reason, is_float32=Way.FAST not in (best[0], *_of_needed(best, operands)))


def _of_needed(ways: tuple[Way, Way, Way], operands: RecordedOperands) -> list[Way]:
    """Return the ways of the gradients that are needed."""
    needed = operands.first_needed, operands.second_needed
    return [way for way, is_needed in zip(ways[1:], needed, strict=True) if is_needed]


class _Costs:
    """The seconds of each part of a recorded product."""

    def __init__(
        self, profile: DeviceProfile, dtype: torch.dtype, workload: Workload, operands: RecordedOperands
    ) -> None:
        self._operands = operands
        name = dtype_name(dtype)
        ways = {way: name_of(way, dtype) for way in (Way.FAST, Way.FLOAT32)}
        by_way = functools.partial(seconds_by_way, profile, ways=ways)
        forward = by_way(workload)
        if workload.op == ATTENTION:
            backward = by_way(workload._replace(op=ATTENTION_BACKWARD))
            if Way.FAST not in backward and is_unsupported(profile, ATTENTION_BACKWARD, name):
                backward[Way.FAST] = math.inf
            if len(backward) < 2:  # it was not measured
                backward = {way: 2 * each for way, each in forward.items()}
            self._seconds = [forward, backward, dict.fromkeys(backward, 0.0)]
        else:
            self._seconds = [forward, *map(by_way, _gradients(workload))]
        self._to = functools.partial(seconds_to_cast, profile, f"to {name}")
        self._from = functools.partial(seconds_to_cast, profile, f"from {name}")
        # Weights and their gradients are read from memory.
        self._to_weight = functools.partial(seconds_to_cast_weight, profile, f"to {name}")
        self._from_weight = functools.partial(seconds_to_cast_weight, profile, f"from {name}")
        self._workload = workload

    @property
    def are_known(self) -> bool:
        return all(len(seconds) == 2 for seconds in self._seconds)

    def of(self, forward: Way, first: Way, second: Way) -> float:
        """Return the seconds of forward and backward in these ways."""
        needed = self._operands
        ways = {forward, *_of_needed((forward, first, second), needed)}
        seconds = self._forward(forward, self._seconds[0])
        if needed.first_needed:
            seconds += self._gradient_of_first(first, self._seconds[1])
        if needed.second_needed:
            seconds += self._gradient_of_second(second, self._seconds[2])
        if Way.FLOAT32 in (first, second):
            seconds += self._from(self._workload.result)
        if ways == {Way.FAST}:
            return seconds  # torch records it
        if needed.is_recomputed:
            return seconds + self._seconds[0][first] + _RECOMPUTING_FUNCTION_SECONDS
        is_native = self._workload.op == ATTENTION or (ways == {Way.FLOAT32} and self._workload.op in _NATIVE_OPS)
        return seconds + (_NATIVE_FUNCTION_SECONDS if is_native else _FUNCTION_SECONDS)

    def _forward(self, way: Way, of_way: Mapping[Way, float]) -> float:
        has = self._operands
        seconds = of_way[way]
        # Casts are saved for the backward, whichever way computes the forward.
        if has.first_is_wide and (way is Way.FAST or has.second_needed):
            seconds += self._to(has.first)
        if has.second_is_wide and (way is Way.FAST or has.first_needed):
            seconds += self._to(has.second)
        if has.is_weight and not has.is_cached and (way is Way.FAST or has.first_needed):
            seconds += self._to_weight(has.second)
        if way is Way.FAST:
            return seconds
        if not has.first_is_wide:
            seconds += self._from(has.first)
        if not has.second_is_wide and not has.is_weight:
            seconds += self._from(has.second)
        return seconds + self._to(self._workload.result)

    def _gradient_of_first(self, way: Way, of_way: Mapping[Way, float]) -> float:
        has = self._operands
        if way is Way.FAST:
            return of_way[way]
        return of_way[way] + self._to(has.first) + (self._from_weight if has.is_weight else self._from)(has.second)

    def _gradient_of_second(self, way: Way, of_way: Mapping[Way, float]) -> float:
        has = self._operands
        if way is Way.FAST:
            return of_way[way] + (self._from_weight(has.second) if has.is_weight else 0.0)
        return of_way[way] + self._from(has.first) + (0.0 if has.is_weight else self._to(has.second))


def _gradients(workload: Workload) -> tuple[Workload, Workload]:
    """Return the workloads of the products that compute the gradients of the operands."""
    if not workload.inner:
        return workload, workload
    other = {"linear": "matmul", "matmul": "linear"}.get(workload.op, workload.op)
    elsewhere = "bmm" if workload.op == "bmm" else "matmul"
    return workload._replace(op=other), Workload(elsewhere, workload.inner, workload.result, workload.size)
