"""`OpTimer`: times all ops in all ways on a device.

A way that is hopelessly slow must not take minutes, nor the time of the others. So cases are timed in order of their
work, and what would take too long by the cases before it, or many times as long as float32, is extrapolated from those.
All cases are timed in several passes, since a machine may be slower for a part of a second, for the same cases in all
ways. A time is noisy unless a second pass confirms it.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from polycast.errors import is_interrupt

from .cases import OPS, Case, Unsupported, cases
from .measurement import FLOAT32, PREEMPTED, Measurement, Omission
from .operands import MeasuredWay, Operands
from .stopwatch import Stopwatch, disagree, load_of_others

_ENDS = (1.1, 1.35, 1.6, 1.85, 2.1)
"""When passes end, in seconds from the beginning. The first includes making the memory that the cases use."""
_QUEUED_PASSES = 3
"""On a device that queues calls, passes take this many times as long: it has more cases, each of which waits for it."""
_WARM_UP_SECONDS = 30.0
"""The most seconds of the first calls on a device that queues them; then no further one is made."""
_SUMS = 5
_SUMMING_SECONDS = 0.1
"""The time for the sums that show the bandwidth, of which the first is computed in any case."""
_LONGEST_CALL = 0.06
"""Cases of which a call would take more seconds, or more than their share of the time, are extrapolated."""
_SHORT_CALL = 0.02
"""A case of which the first call takes fewer seconds is timed again at once, whatever its share; one whose first call
was preempted, up to `_LONGEST_CALL`."""
_HOPELESS = 3
"""A case is not timed but extrapolated if its two nearest smaller cases, of fewer rows and of a smaller size, both take
more than this many times as long as in float32; twice as many, if only one of them was timed."""
_LONG_ENOUGH = 1e-4, 5
"""A smaller case counts for that if it takes more seconds in float32 than the first number, or more times as long as
the shortest call of the op than the second: of shorter ones, much is the overhead of a call."""
_IMPLAUSIBLE = 1.5
"""The time of a call that takes this many times as long as one with more work is noisy."""


@dataclass
class _Entry:
    """A case in a way: a function that computes it, and its times.

    Attributes:
        once: the approximate seconds.
        was_preempted: whether the call was preempted each time that these were measured.
        passes: the least seconds of each pass in which it was not preempted each time.
    """

    case: Case
    way: str
    call: Callable[[], object]
    once: float
    was_preempted: bool
    passes: list[float] = field(default_factory=list)
    noisy: bool = False

    @property
    def seconds(self) -> float:
        return min(self.passes, default=self.once)

    @property
    def rate(self) -> float:
        """The seconds by unit of work."""
        return self.seconds / self.case.work


class _Allowance(NamedTuple):
    """The seconds that a case may take in a pass, those that are left of the pass, and whether it is the last."""

    seconds: float
    seconds_left: float
    is_last: bool


class OpTimer:
    """Times the cases on a device in some ways, beginning when it is made."""

    def __init__(self, device_type: str, ways: Sequence[MeasuredWay]) -> None:
        self._start = time.perf_counter()
        self._loads: list[float] = []
        self.omissions: list[Omission] = []
        self._device_type = device_type
        self._ways = ways
        self._casts = [
            replace(way, name=f"{direction} {way.name}")
            for way in ways
            if way.kernels is None and way.name != FLOAT32
            for direction in ("to", "from")
        ]
        self._operands = Operands(device_type)
        self._stopwatch = Stopwatch(device_type)
        self._cases = [case for case in cases() if case.is_for(device_type, self._stopwatch.is_queued)]
        self._entries: dict[tuple[Case, str], _Entry] = {}
        self._unsupported: set[tuple[Case, str]] = set()
        self._hopeless: dict[tuple[Case, str], float | None] = {}
        """The time of each case and way relative to float32, if it is extrapolated from that; None for others."""
        self._rates: dict[tuple[str, str], float] = {}
        """The least seconds by unit of work, by op and way."""

    def run(self) -> None:
        """Time all cases in each pass."""
        if self._stopwatch.is_queued:
            self._warm_up()
            self._start = time.perf_counter()
        for end in _ENDS:
            seconds = end * (_QUEUED_PASSES if self._stopwatch.is_queued else 1)
            self._run(self._start + seconds, is_last=end == _ENDS[-1])
            if not self._stopwatch.is_queued:
                self._loads.append(load_of_others())
        self._mark_noisy()

    def _warm_up(self) -> None:
        """Compute each case in each way: in the first call, such a device loads a kernel, or compiles it."""
        end = time.perf_counter() + _WARM_UP_SECONDS
        for case in self._cases:
            for way in self._ways_of(case):
                if time.perf_counter() < end:
                    with contextlib.suppress(Exception):  # a pass finds out, and notes it
                        case.check(way, self._operands)
                        self._stopwatch.time(
                            _with_dtype(case.prepare(way, self._operands), self._device_type, way.fast)
                        )

    def measurements(self) -> tuple[Measurement, ...]:
        """Return the times, by op, size and rows."""
        ordered = sorted(self._cases, key=lambda case: (OPS.index(case.op), case.size, case.rows))
        found = [self._measurement(case, way) for case in ordered for way in self._ways_of(case)]
        return tuple(each for each in found if each is not None)

    def other_load(self) -> float:
        """Return the part of the processors' time that others took: the median of the passes."""
        return statistics.median(self._loads or [0.0])

    def bandwidth(self) -> float:
        """Return the rate at which memory is read: the best of a sum and of products with one row; 0 if unknown."""
        whole, end = self._operands.whole(), time.perf_counter() + _SUMMING_SECONDS
        rates = [0.0]
        with contextlib.suppress(Exception):  # of a backend without sums
            while len(rates) <= _SUMS and (len(rates) == 1 or time.perf_counter() < end):
                rates.append(whole.nbytes / self._stopwatch.time(whole.sum))
        widths = {way.name: way.dtype.itemsize for way in self._ways if way.kernels is None}
        for entry in self._entries.values():
            case = entry.case
            is_product = case.op == "linear" and case.rows == 1 and not self._operands.is_small(case.size)
            if is_product and entry.way in widths:
                rates.append(case.size * widths[entry.way] / entry.seconds)
        return max(rates)

    def _measurement(self, case: Case, way: MeasuredWay) -> Measurement | None:
        """Return the time of a case in a way; None if it is unsupported, or no time of the op in the way is known."""
        entry = self._entries.get((case, way.name))
        if entry is not None and entry.passes:
            return Measurement(case.op, case.rows, way.name, entry.seconds, case.size, noisy=entry.noisy)
        if (case, way.name) in self._unsupported:
            return None
        ratio = self._hopeless.get((case, way.name))
        found = self._rate_like(case, way.name if ratio is None else FLOAT32)
        if found is None:
            self.omissions.append(Omission(case.op, way.name, PREEMPTED))
            return None
        rate, is_noisy = found
        rate *= 1.0 if ratio is None else ratio
        noisy = is_noisy or entry is not None
        return Measurement(case.op, case.rows, way.name, rate * case.work, case.size, noisy=noisy, extrapolated=True)

    def _ways_of(self, case: Case) -> Sequence[MeasuredWay]:
        if case.op == "cast":
            return self._casts
        return self._ways if case.weight is not None else [way for way in self._ways if way.kernels is None]

    def _run(self, end: float, is_last: bool) -> None:
        """Time all cases in a pass, but for those that there is no time for."""
        weights = sum(case.time_weight for case in self._cases)
        for case in self._cases:
            left = end - time.perf_counter()
            self._time(case, _Allowance(left * case.time_weight / weights, left, is_last))
            weights -= case.time_weight

    def _time(self, case: Case, allowed: _Allowance) -> None:
        entries = [entry for way in self._ways_of(case) if (entry := self._entry(case, way, allowed)) is not None]
        to_time = [
            entry
            for entry in entries
            if entry.passes or entry.once < max(allowed.seconds, _LONGEST_CALL if entry.was_preempted else _SHORT_CALL)
        ]
        rounds = self._stopwatch.time_interleaved(
            {entry.way: entry.call for entry in to_time},
            {entry.way: entry.seconds for entry in to_time},
            allowed.seconds / 2,
        )
        for entry in entries:
            found = rounds.get(entry.way, [])
            if isinstance(found, Exception):
                self._omit(case, entry.way, _text_of(found))
                continue
            if not (found or entry.passes or entry.was_preempted):
                found = [entry.once]
            entry.passes += [min(found)] if found else []
            key = case.op, entry.way
            self._rates[key] = min(entry.rate, self._rates.get(key, entry.rate))

    def _entry(self, case: Case, way: MeasuredWay, allowed: _Allowance) -> _Entry | None:
        """Return the entry of a case in a way to time; None if it cannot be computed, or there is no time for it."""
        if (case, way.name) in self._unsupported:
            return None
        entry = self._entries.get((case, way.name))
        if entry is not None:
            # Time a case again that took longer than expected: it may have been preempted.
            longest = max(_LONGEST_CALL, allowed.seconds_left / 2)
            return entry if allowed.seconds > 0 and entry.seconds <= longest else None
        expected = self._rates.get((case.op, way.name), 0.0) * case.work  # 0: it is the first of the op
        start = time.perf_counter()
        try:
            case.check(way, self._operands)
            self._hopeless[case, way.name] = ratio = self._hopeless_ratio(case, way)
            if ratio is not None:
                return None
            if expected and (allowed.is_last or expected > min(_LONGEST_CALL, allowed.seconds)):
                return None
            call = _with_dtype(case.prepare(way, self._operands), self._device_type, way.fast)
            if not expected:
                call()  # the first call of an op may read a library from the disk, or memory back from swap
            once, was_preempted = self._stopwatch.estimate(call, allowed.seconds / 10)
        except Unsupported as reason:
            self._omit(case, way.name, str(reason))
        except Exception as error:  # a backend's kernels may raise anything
            if is_interrupt(error):
                raise
            self._omit(case, way.name, _text_of(error))
            if not expected and time.perf_counter() - start > _LONGEST_CALL:
                self._unsupported.update((each, way.name) for each in self._cases if each.op == case.op)
        else:
            entry = self._entries[case, way.name] = _Entry(case, way.name, call, once, was_preempted)
        return entry

    def _hopeless_ratio(self, case: Case, way: MeasuredWay) -> float | None:
        """Return the approximate time of a way relative to float32 if it is hopeless, else None.

        It is the lesser one of two: that of the case with the next fewer rows of the same size, and that of the case
        with the next smaller size and the same rows.
        """
        longest, times = _LONG_ENOUGH
        in_float32 = {
            known: entry.seconds
            for (known, name), entry in self._entries.items()
            if (known.op, name) == (case.op, FLOAT32) and entry.passes
        }
        least = min(longest, times * min(in_float32.values(), default=0.0))
        ratios = {
            known: entry.seconds / in_float32[known]
            for (known, name), entry in self._entries.items()
            if name == way.name and entry.passes and in_float32.get(known, 0.0) > least and case.is_at_least(known)
        }
        near = [
            max((each for each in ratios if each.size == case.size), key=lambda each: each.rows, default=None),
            max((each for each in ratios if each.rows == case.rows), key=lambda each: each.size, default=None),
        ]
        known = [ratios[each] for each in near if each is not None]
        ratio = min(known, default=0.0)
        return ratio if ratio > (_HOPELESS if len(known) == len(near) else 2 * _HOPELESS) else None

    def _omit(self, case: Case, way: str, reason: str) -> None:
        self._unsupported.add((case, way))
        self._entries.pop((case, way), None)
        if not any((each.op, each.way) == (case.op, way) for each in self.omissions):
            self.omissions.append(Omission(case.op, way, reason))

    def _rate_like(self, case: Case, way: str) -> tuple[float, bool] | None:
        """Return the seconds by unit of work of a case, if it was timed, or of the most rows of the same size, or else
        the least of all, and whether they are noisy; None if all were preempted.

        Cases with more rows or a larger size are used only if no others were timed.
        """
        of_op = [
            entry for entry in self._entries.values() if (entry.case.op, entry.way) == (case.op, way) and entry.passes
        ]
        timed = [entry for entry in of_op if case.is_at_least(entry.case)] or of_op
        alike = [entry for entry in timed if entry.case.size == case.size]
        if not timed:
            return None
        found = max(alike, key=lambda each: each.case.rows) if alike else min(timed, key=lambda each: each.rate)
        return found.rate, found.noisy

    def _mark_noisy(self) -> None:
        for entry in self._entries.values():
            entry.noisy = disagree(entry.passes) or any(
                entry.seconds > _IMPLAUSIBLE * other.seconds
                for other in self._entries.values()
                if (other.case.op, other.way) == (entry.case.op, entry.way) and other.case.is_at_least(entry.case)
            )


def _text_of(error: Exception) -> str:
    """Return the type and the first sentence of an error; torch's go on to list its dispatch keys."""
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line.partition('. ')[0]}"


def _with_dtype(call: Callable[[], object], device_type: str, dtype: torch.dtype) -> Callable[[], object]:
    """Return a function that makes a call with a fast dtype set, which kernels of backends read."""

    def with_dtype() -> None:
        torch.set_autocast_dtype(device_type, dtype)
        call()

    return with_dtype
