"""Observe some steps of a training run, and write a report."""

import os
from pathlib import Path

from torch import nn

from polycast import observe
from polycast_plugins.observe import Observation


class StepObserver:
    """Observes a range of a run's steps.

    Args:
        report: the HTML file to write when the last of the steps has ended, or the run; None: none.
        first: the first step to observe, counted from 0 over all runs; a later first step skips one-time work, such as
            compiling.
        steps: the number of steps.

    Raises:
        TypeError: `first` or `steps` is not an int.
        ValueError: `first` is negative, or `steps` not positive.
    """

    def __init__(self, report: str | os.PathLike[str] | None = None, *, first: int = 10, steps: int = 10) -> None:
        for name, value, least in (("first", first, 0), ("steps", steps, 1)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.report = None if report is None else Path(report)
        self.first, self.steps = first, steps
        self.observation: Observation | None = None
        self._open: observe | None = None
        self._step = 0

    def begin_step(self, model: nn.Module) -> None:
        """Start to observe, if this is the first step to observe."""
        if self._step == self.first and self._open is None:
            opened = observe(model)
            self.observation = opened.__enter__()
            self._open = opened

    def end_step(self) -> None:
        """Count a step, and stop after the last one to observe."""
        self._step += 1
        if self._step == self.first + self.steps:
            self.stop()

    def stop(self) -> None:
        """Stop observing, if it was started, and write the report."""
        if self._open is None:
            return
        opened, self._open = self._open, None
        opened.__exit__(None, None, None)
        if self.report is not None and self.observation is not None:
            self.observation.to_html(self.report)
