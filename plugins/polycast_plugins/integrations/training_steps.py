"""Steps of a library's training loop: some are observed, and all are recorded in a RunLog."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from polycast import RunLog, observe
from polycast_plugins.observe import Observation, StepLog


class StepObserver:
    """Observes a range of steps, counted from 0 over all runs, and writes a report when it has ended, or the run has.

    A later `first` step skips one-time work, such as compiling.
    """

    def __init__(self, report: str | os.PathLike[str] | None = None, *, first: int = 10, steps: int = 10) -> None:
        for name, value, least in (("first", first, 0), ("steps", steps, 1)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.report = None if report is None else Path(report)
        self._first, self._steps = first, steps
        self.observation: Observation | None = None
        self._open: observe | None = None
        self._step = 0

    def begin_step(self, model: nn.Module) -> None:
        """Start to observe, if this is the first step to observe."""
        if self._step == self._first and self._open is None:
            opened = observe(model)
            self.observation = opened.__enter__()
            self._open = opened

    def end_step(self) -> None:
        """Count a step, and stop after the last one to observe."""
        self._step += 1
        if self._step == self._first + self._steps:
            self.stop()

    def stop(self) -> None:
        """Stop observing, if it was started, and write the report."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)
            if self.report is not None and self.observation is not None:
                self.observation.to_html(self.report)


_recorders: "WeakKeyDictionary[RunLog, StepRecorder]" = WeakKeyDictionary()
"""The recorder of the latest run of each log."""


class StepRecorder:
    """Records steps whose begin and end a library announces, and writes a page when the run ends, however it does."""

    def __init__(self, log: RunLog | None, page: str | os.PathLike[str] | None = None) -> None:
        if log is not None and not isinstance(log, RunLog):
            raise TypeError(f"log must be a polycast.RunLog or None, got {log!r:.100}")
        if page is not None and log is None:
            raise TypeError(f"page={os.fspath(page)!r} shows the steps of a log: pass log=polycast.RunLog(...), too")
        self.log = log
        self._page = None if page is None else Path(page)
        self._is_writer = True
        self._open: AbstractContextManager[StepLog] | None = None
        self._step: StepLog | None = None
        self._losses: list[torch.Tensor | float] = []

    def begin_run(
        self, model: nn.Module | None, scaler: Any, steps_done: int = 0, *, is_first_process: bool = True
    ) -> None:
        """Begin a run, which goes on after a number of steps if it was resumed. Other processes record nothing."""
        self._is_writer = is_first_process
        if self.log is None:
            return
        before = _recorders.get(self.log)
        if before is not None:  # its run has failed, which its library has not announced
            before.abandon_step()
        _recorders[self.log] = self
        if self._is_writer:
            self.log.watch(model, scaler if isinstance(scaler, torch.amp.GradScaler) else None)
            if steps_done:
                self.log.load_state_dict({"steps": steps_done})

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun."""
        return self._open is not None

    def begin_step(self) -> None:
        """Begin a step, unless one has begun."""
        if self.log is None or not self._is_writer or self._open is not None:
            return
        opened = self.log.step()
        self._step = opened.__enter__()
        self._open, self._losses = opened, []

    def add_loss(self, loss: Any) -> None:
        """Note the loss of a batch of the step; anything but a number is ignored."""
        if self._open is None:
            return
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().float())
        elif isinstance(loss, (float, int)):
            self._losses.append(loss)

    def end_step(self, error: BaseException | None = None, *, mean: bool = True) -> None:
        """End the step, if one has begun, with the mean or the sum of the losses of its batches."""
        opened, self._open = self._open, None
        if opened is None or self._step is None:
            return
        if self._losses:
            self._step.log(loss=sum(self._losses) / (len(self._losses) if mean else 1))
        try:
            opened.__exit__(
                None if error is None else type(error), error, None if error is None else error.__traceback__
            )
        except BaseException as raised:
            if raised is not error:
                raise

    def abandon_step(self) -> None:
        """End a step that a failed run has left open; it is recorded if it has values."""
        self.end_step(RuntimeError("the run failed"))

    def end_run(self, error: BaseException | None = None) -> None:
        """End the run, and write the page."""
        self.end_step(error)
        if self._page is not None and self.log is not None and self._is_writer:
            self.log.history.to_html(self._page)
