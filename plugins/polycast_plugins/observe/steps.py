"""`Steps`: the steps of an observed program, and which of them a schedule selects."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from polycast.errors import warn_user

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
