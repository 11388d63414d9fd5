"""Read which steps of a run are observed."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

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
    """Return a function that says whether a step is observed.

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
