"""Record the steps of a library's training loop in a RunLog."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from polycast import RunLog
from polycast_plugins.observe import StepLog

_recorders: "WeakKeyDictionary[RunLog, StepRecorder]" = WeakKeyDictionary()
"""The recorder of the latest run of each log."""


class StepRecorder:
    """Records steps whose begin and end a library announces.

    Args:
        log: the log; None: nothing is recorded.
        page: the HTML file to write when the run ends, however it does; None: none.

    Raises:
        TypeError: `log` is not a RunLog, or there is a `page` without it.
    """

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
        self._take_over()
        if self.log is not None and self._is_writer:
            self.log.watch(model, scaler if isinstance(scaler, torch.amp.GradScaler) else None)
            if steps_done:
                self.log.load_state_dict({"steps": steps_done})

    def _take_over(self) -> None:
        """End the step of a run that failed; its library has not announced the end."""
        if self.log is not None:
            before = _recorders.get(self.log)
            if before is not None:
                before.abandon_step()
            _recorders[self.log] = self

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
        if self._open is not None and isinstance(loss, (torch.Tensor, float, int)):
            if not isinstance(loss, torch.Tensor):
                self._losses.append(loss)
            elif loss.numel() == 1:
                self._losses.append(loss.detach().float())

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
