"""The steps of an observed program: which ones a schedule selects, and what a step shows."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from polycast.errors import warn_user
from polycast.plugin import dtype_name

from .facts import Facts
from .grad_scaler import RecordingGradScaler
from .observation import Observation
from .recorder import Reading, phase_of
from .step_records import Origin, SkippedStep

Schedule: TypeAlias = Callable[[int], Any]
"""A function of the number of a step, as ``torch.profiler.schedule`` returns."""

_LOOKED_AT = 10_000


def _never(step: int) -> bool:
    return False


def _every(number: int, step: int) -> bool:
    return step % number == 0


def _records(schedule: Schedule, step: int) -> bool:
    return "RECORD" in getattr(schedule(step), "name", "")


def read_schedule(schedule: Schedule | int | None) -> Callable[[int], bool]:
    """Return a function that returns whether a step is observed; None selects none.

    Raises:
        TypeError: `schedule` is neither callable nor an int nor None.
        ValueError: it observes no step.
    """
    if schedule is None:
        return _never
    if isinstance(schedule, int) and not isinstance(schedule, bool):
        if schedule < 1:
            raise ValueError(f"schedule must be at least 1 (each step), or None, got {schedule}")
        return functools.partial(_every, schedule)
    if not callable(schedule):
        raise TypeError(
            f"schedule must be an int n (every n-th step), torch.profiler.schedule(...) or None, got {schedule!r:.100}"
        )

    is_observed = functools.partial(_records, schedule)
    if not any(map(is_observed, range(_LOOKED_AT))):
        raise ValueError(
            f"schedule={schedule!r:.100} observes none of the first {_LOOKED_AT:,} steps: it must return "
            "torch.profiler.ProfilerAction.RECORD for some"
        )
    return is_observed


class Steps:
    """Counts the steps of a program.

    Args:
        schedule: the steps to observe, as for :func:`polycast.observe`; None: all.

    Raises:
        TypeError, ValueError: it is not a schedule, or selects no step.
    """

    def __init__(self, schedule: Schedule | int | None) -> None:
        self._selects = None if schedule is None else read_schedule(schedule)
        self.ended = 0
        """The steps that have ended."""
        self.observed = 0
        """Those that were observed."""
        self.is_observed = self._selects is None or self._selects(0)
        """Whether the step that runs is observed."""

    def next(self) -> None:
        """End a step, and begin the next one."""
        self.ended += 1
        self.observed += self.is_observed
        if self._selects is not None:
            self.is_observed = self._selects(self.ended)

    def warn_if_unobserved(self) -> None:
        """Warn if the schedule has selected none of the steps."""
        if self.observed or self.is_observed:
            return
        remedy = (
            "Lower the number of steps that it waits or skips."
            if self.ended
            else "Call step() of the observation after each training step: seen.step()."
        )
        warn_user(f"nothing was observed: the schedule selects none of the steps 0 to {self.ended}. {remedy}")


def fast_time_share(reading: Reading) -> float | None:
    """Return the share of the time in ops that ops in the fast dtypes of the step's regions took."""
    fast = {row.fast for row in reading.counts if row.device is not None}
    fast |= {region.dtype for region in reading.regions if region.enabled}
    seconds = [each for row in reading.counts for each in row.seconds]
    total = sum(time for _, time in seconds)
    in_fast = sum(time for dtype, time in seconds if dtype in fast - {None, torch.float32})
    return in_fast / total if total else None


def underflow_share(reading: Reading, *, of_gradients: bool = False) -> float | None:
    """Return the share of the values of the step, or of its backward pass, that underflowed."""
    rows = [row for row in reading.numerics if row.backward or not of_gradients]
    count = sum(row.count for row in rows)
    return sum(row.underflowed for row in rows) / count if count else None


def first_nonfinite(reading: Reading) -> Origin | None:
    """Return the first op that produced inf or nan; None also without ``nonfinite="record"``."""
    row = reading.nonfinite
    if row is None:
        return None
    return Origin(
        op=row.op,
        phase=phase_of(row.backward),
        module=reading.name_of(row.module),
        what=" and ".join(name for name in ("inf", "nan") if getattr(row, name)),
        dtype=dtype_name(row.dtype),
        stack=tuple(row.stack or ()),
    )


def origin_of(seen: Observation) -> Origin | None:
    """Return the first op that produced inf or nan, which ``nonfinite="record"`` finds."""
    first = seen.nonfinite
    if first is None:
        return None
    return Origin(first.op, first.phase, first.module, first.what, first.dtype, first.stack)


def origin_by_numerics(facts: Facts) -> Origin | None:
    """Return an op with an overflow: of the first module in the forward pass, else of the last in backward."""
    order = {module.module: number for number, module in enumerate(facts.modules)}
    overflows = [record for record in facts.numerics if record.overflowed]
    forward = [record for record in overflows if record.role == "forward"]
    pick = min if forward else max
    if not overflows:
        return None
    first = pick(forward or overflows, key=lambda record: order.get(record.module or "", -1))
    return Origin(first.op, first.role, first.module, "inf or nan", first.dtype)


class StepOrigins:
    """Reports to scalers the op that made a step non-finite, if an observation of many steps has found it.

    An observation keeps the first such op only, so that is known for the first step with one.

    Args:
        seen: the observation.
        nonfinite_count: returns how many ops have produced inf or nan so far.
    """

    def __init__(self, seen: Observation, nonfinite_count: Callable[[], int]) -> None:
        self._seen, self._count = seen, nonfinite_count
        self._count_before = 0

    def origin(self, scaler: RecordingGradScaler) -> Origin | None:
        """Return the first op, if it belongs to this step."""
        return None if self._count_before or not self._count() else origin_of(self._seen)

    def updated(self, scaler: RecordingGradScaler, scale: float | None, skip: SkippedStep | None) -> None:
        """Note how many such ops there were by the end of the step."""
        self._count_before = self._count()
