"""`Steps`: the steps of an observed program, and which of them are observed."""

from ..errors import warn_user
from .step_schedule import Schedule, read_schedule


class Steps:
    """Counts the steps of a program.

    Args:
        schedule: which steps are observed, as for :func:`polycast.observe`.

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
        self._any = self.is_observed

    def next(self) -> None:
        """End a step, and begin the next one."""
        self.ended += 1
        self.observed += self.is_observed
        if self._selects is not None:
            self.is_observed = self._selects(self.ended)
            self._any = self._any or self.is_observed

    def warn_if_unobserved(self) -> None:
        """Warn if the schedule has selected none of the steps."""
        if self._any:
            return
        remedy = (
            "Lower the number of steps that it waits or skips."
            if self.ended
            else "Call step() of the observation after each training step: seen.step()."
        )
        warn_user(f"nothing was observed: the schedule selects none of the steps 0 to {self.ended}. {remedy}")
