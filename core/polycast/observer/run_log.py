"""`RunLog`: record a training run, step by step."""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..region.recording_scaler import listeners, recording
from .observation import Observation
from .observe import observe, observe_step
from .run_history import RunHistory
from .scalars import Writer, check_writer, scalars_of_step, write_scalars
from .step_log import StepLog
from .step_record import StepRecord, line_of
from .step_schedule import Schedule, read_schedule

_NONFINITE = ("ignore", "record")


class RunLog:
    """Record a training run, step by step: loss, scale, skipped steps, and on some steps an observation.

    Each step is written as soon as it ends, so that an interrupted run keeps what it recorded. A step that is not
    observed costs some tens of microseconds, and the wait for the loss if that is on a GPU.

    Args:
        path: a file of JSON lines, one for each step. None: the steps are kept in memory.
        model: the model, which names modules and parameters. It is held weakly.
        scaler: the gradient scaler: ``polycast.grad_scaler(...)``, which is found without being named, or a
            torch.amp.GradScaler, which records its history from now on.
        writer: write scalars of each step there, too; as in :meth:`Observation.log_to`.
        schedule: the steps to observe: every n-th (an int), or those that ``torch.profiler.schedule(...)`` records.
            None: none.
        numerics: as in :class:`polycast.observe`: count underflow on observed steps.
        nonfinite: ``"record"``: find the first op that makes inf or nan, on observed steps.
        resume: continue the file if it exists. Without it, an existing file is an error.

    Raises:
        TypeError: an argument has another type.
        ValueError: `path` has no folder, `nonfinite` another value, or `schedule` observes no step.
        FileExistsError: at the first step, the file exists, and neither `resume` nor :meth:`load_state_dict` was used.
        RuntimeError: at the first observed step, see :class:`polycast.observe`.

    Example:
        >>> import torch, polycast
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = polycast.grad_scaler("cpu", torch.float16)
        >>> log = polycast.RunLog(model=model)
        >>> for _ in range(3):
        ...     with log.step() as step:
        ...         with polycast.autocast("cpu", torch.float16):
        ...             loss = model(torch.ones(2, 4)).float().pow(2).mean()
        ...         step.log(loss=loss)
        ...         optimizer.zero_grad()
        ...         scaler.scale(loss).backward()
        ...         scaler.step(optimizer)
        ...         scaler.update()
        >>> [(record.scale, record.skipped) for record in log.history.steps]
        [(65536.0, False), (65536.0, False), (65536.0, False)]
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        model: nn.Module | None = None,
        scaler: torch.amp.GradScaler | None = None,
        writer: Writer | None = None,
        schedule: Schedule | int | None = None,
        numerics: bool = False,
        nonfinite: Literal["ignore", "record"] = "ignore",
        resume: bool = False,
    ) -> None:
        if nonfinite not in _NONFINITE:
            raise ValueError(f"nonfinite must be one of {', '.join(map(repr, _NONFINITE))}, got {nonfinite!r}")
        if not isinstance(resume, bool):
            raise TypeError(f"resume must be a bool, got {resume!r}")
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"scaler must be a torch.amp.GradScaler or None, got {scaler!r:.100}")
        if writer is not None:
            check_writer(writer)
        self._options: dict[str, Any] = {"nonfinite": nonfinite, "timing": True, "numerics": numerics}
        observe(model, **self._options)  # raises if they are wrong
        self._is_observed = read_schedule(schedule)
        self._model: weakref.ref[nn.Module] | None = None
        self._path = None if path is None else _checked(Path(path))
        self._resume = resume
        self._is_open = False
        self._records: list[StepRecord] = []
        self._writer = writer
        self._next: int | None = None
        self.observation: Observation | None = None
        """The observation of the last observed step. Its records are made when it is read."""
        self.watch(model, scaler)

    def watch(self, model: nn.Module | None = None, scaler: torch.amp.GradScaler | None = None) -> None:
        """Observe this model, and record the history of this scaler, if there was none before."""
        if model is not None and self.model is None:
            self._model = weakref.ref(model)
        if scaler is not None:
            recording(scaler, self.model)

    @property
    def model(self) -> nn.Module | None:
        """The model; None without one, or if it was garbage-collected."""
        return None if self._model is None else self._model()

    @property
    def history(self) -> RunHistory:
        """The steps so far."""
        if self._path is None:
            return RunHistory(self._records)
        return RunHistory.load(self._path) if self._path.exists() else RunHistory()

    @contextmanager
    def step(self, rerun: Callable[[], Any] | None = None) -> Iterator["StepLog"]:
        """Record a step: a context manager, for one call of ``optimizer.step()`` with all that leads to it.

        Args:
            rerun: a function that computes the loss and calls backward as the step did. If the scaler skips the step,
                it is called to find the first op that produced inf or nan, with the random numbers of the step and the
                same weights; gradients and buffers are restored afterwards.

        Raises:
            TypeError: `rerun` is not callable.
            FileExistsError, RuntimeError: see :class:`RunLog`.
        """
        if rerun is not None and not callable(rerun):
            raise TypeError(f"rerun must be a function without arguments or None, got {rerun!r:.100}")
        number = self._open()
        step = StepLog(self.model, rerun)
        try:
            began = time.perf_counter()
            with ExitStack() as stack:
                listeners.add(step, threading.get_ident())
                stack.callback(listeners.remove, step)
                if self._is_observed(number):
                    step.observed = observe_step(self.model, **self._options)
                    step.seen = self.observation = stack.enter_context(step.observed)
                yield step
        except BaseException:
            if step.has_values:  # what an interrupted step has recorded is kept
                self._add(step.record(number, time.perf_counter() - began))
            raise
        self._add(step.record(number, time.perf_counter() - began))

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, for a checkpoint."""
        return {"steps": self._next or 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the steps of a checkpoint, in the same file.

        Raises:
            ValueError: it is not the state of a log.
        """
        steps = state.get("steps") if isinstance(state, dict) else None
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"the state of a RunLog is {{'steps': n}}, got {state!r:.100}")
        self._next, self._resume = steps, True
        self._is_open = False

    def _open(self) -> int:
        """Check the file, if there is one, at the first step, and return the number of the next step."""
        if self._path is not None and not self._is_open:
            if not self._resume and self._path.exists():
                raise FileExistsError(
                    f"{self._path} has the steps of a run. To continue it, pass resume=True or load the state of the "
                    "log from the checkpoint; else name another file or delete it."
                )
            if self._path.exists():
                kept = self.history
                if self._next is None and len(kept):
                    self._next = kept.steps[-1].step + 1
                text = self._path.read_text(encoding="utf-8")
                if not text.endswith("\n"):  # the process was killed as it wrote
                    self._path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
            self._is_open = self._resume = True
        return self._next or 0

    def _add(self, record: StepRecord) -> None:
        self._next = record.step + 1
        if self._path is None:
            self._records.append(record)
        else:
            with self._path.open("a", encoding="utf-8") as file:  # closed at once: a log is never closed
                file.write(line_of(record))
        if self._writer is not None:
            write_scalars(self._writer, scalars_of_step(record), record.step)


def _checked(path: Path) -> Path:
    if path.is_dir() or not path.parent.is_dir():
        wrong = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.parent}"
        raise ValueError(f"{path} {wrong}. Name a file in a folder that exists, such as run.jsonl.")
    return path
