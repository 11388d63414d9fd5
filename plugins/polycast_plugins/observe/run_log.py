"""`RunLog`: record a training run, step by step."""

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from polycast.errors import warn_user

from .conversions import Writer, check_writer, scalars_of_step, write_scalars
from .facts import DATE
from .grad_scaler import listeners, recording
from .observation import Observation
from .observer import check_bools, check_option, observe, observe_step
from .packages import computed_by
from .run_history import RunHistory
from .step_log import StepLog
from .steps import Schedule, StepRecord, line_of, read_schedule, records_of, without_lost_steps


class StepFile:
    """A file of JSON lines, one for each step; see :class:`RunLog`.

    A step that cannot be written, because the disk is full, is kept in memory and written after the next one.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir() or not path.parent.is_dir():
            wrong = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.parent}"
            raise ValueError(f"{path} {wrong}. Name a file in a folder that exists, such as run.jsonl.")
        rank = _rank()
        self.path = path if rank in ("", "0") else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        self._unwritten: list[StepRecord] = []

    def open(self, *, resume: bool) -> int:
        """Prepare the file for the first step, and return the number of steps in it."""
        if not resume and self.path.exists() and self.path.stat().st_size:
            raise FileExistsError(
                f"{self.path} has the steps of a run. To continue it, pass resume=True or load the state of the "
                "log from the checkpoint; else name another file or delete it."
            )
        with self.path.open("ab"):
            pass
        records = self.read()
        self._end_last_line()
        return records[-1].step + 1 if records else 0

    def _end_last_line(self) -> None:
        """Complete or remove the last line if the process was killed as it wrote that."""
        with self.path.open("r+b") as file:
            data = file.read()
            start = data.rfind(b"\n") + 1
            if list(records_of([data[start:].decode("utf-8", "replace")])):
                file.write(b"\n")
            else:
                file.truncate(start)

    def read(self) -> list[StepRecord]:
        """Return the steps so far."""
        written: list[StepRecord] = []
        if self.path.exists():
            with self.path.open(encoding="utf-8") as lines:
                written = list(records_of(lines))
        return without_lost_steps([*written, *self._unwritten])

    def append(self, record: StepRecord) -> None:
        """Write a step, or keep it and warn if that is not possible."""
        self._unwritten.append(record)
        data = "".join(map(line_of, self._unwritten)).encode()
        try:
            _append(self.path, data)
        except OSError as error:
            if len(self._unwritten) == 1:
                warnings.warn(
                    f"{self.path} cannot be written: {error.strerror or error}. The run goes on; its steps are kept in "
                    "memory until there is room.",
                    stacklevel=2,
                )
        else:
            self._unwritten.clear()


def _append(path: Path, data: bytes) -> None:
    """Append all of the data or nothing; the file is closed at once, because a log has no end."""
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except BaseException:
            file.truncate(end)
            raise


def _rank() -> str:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return str(distributed.get_rank())
    return os.environ.get("RANK", "")


class RunLog:
    """Record a training run, step by step: loss, scale, skipped steps, and on some steps an observation.

    Each step is written as soon as it ends, so that an interrupted run keeps what it recorded. A step that is not
    observed costs some tens of microseconds, and the wait for the loss if that is on a GPU.

    Args:
        path: a file of JSON lines, one for each step. None: the steps are kept in memory. In a process of rank 1 of a
            distributed run, ``run.jsonl`` becomes ``run.rank1.jsonl``.
        model: the model, which names modules and parameters. It is held weakly.
        scaler: the gradient scaler: ``polycast.grad_scaler(...)``, which is found without being named, or a
            torch.amp.GradScaler, which records its history from now on.
        writer: write scalars of each step there, too; as in :meth:`~polycast_plugins.observe.Observation.log_to`.
        schedule: the steps to observe: every n-th (an int), or those that ``torch.profiler.schedule(...)`` records.
            None: none.
        numerics: as in :class:`polycast.observe`: count underflow on observed steps.
        nonfinite: ``"record"``: find the first op that makes inf or nan, on observed steps. Steps that follow a skipped
            one are observed, too, so it is found in a run that keeps skipping.
        resume: continue the file if it exists. Without it, an existing file is an error.

    Raises:
        TypeError: an argument has another type.
        ValueError: `path` has no folder or is that of `writer`, `nonfinite` has another value, or `schedule` observes
            no step.
        FileExistsError: at the first step, the file has steps, and neither `resume` nor :meth:`load_state_dict` was
            used.
        OSError: at the first step, the file cannot be written.
        RuntimeError: at the first observed step, see :class:`polycast.observe`.

    Warns:
        UserWarning: the file can no longer be written, as on a full disk. The run goes on, and its steps are written
            when there is room.

    Example:
        >>> import torch, polycast
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = polycast.grad_scaler("cpu", torch.float16, init_scale=256.0)
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
        [(256.0, False), (256.0, False), (256.0, False)]
    """

    _computed_by: Mapping[str, Any] | None = None

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
        check_option("nonfinite", nonfinite, ("ignore", "record"))
        check_bools(resume=resume)
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"scaler must be a torch.amp.GradScaler or None, got {scaler!r:.100}")
        if writer is not None:
            check_writer(writer)
        self._options: dict[str, Any] = {"nonfinite": nonfinite, "timing": True, "numerics": numerics}
        observe(model, **self._options)  # raises if they are wrong
        self._is_scheduled = None if schedule is None else read_schedule(schedule)
        self._follows_skipped = False
        self._model: weakref.ref[nn.Module] | None = None
        self._file = None if path is None else StepFile(Path(path))
        if (
            path is not None
            and isinstance(writer, (str, os.PathLike))
            and Path(writer).absolute() == Path(path).absolute()
        ):
            raise ValueError(f"path and writer are the same file, {os.fspath(path)}: name another for the scalars")
        self._resume, self._date = resume, time.strftime(DATE, time.gmtime())
        self._is_in_step = False
        self._is_open = False
        self._records: list[StepRecord] = []
        self._writer = writer
        self._next: int | None = None
        self.observation: Observation | None = None
        """The observation of the last observed step. Its records are made when it is read."""
        self.watch(model, scaler)

    def watch(self, model: nn.Module | None = None, scaler: torch.amp.GradScaler | None = None) -> None:
        """Observe this model, unless the log already has one, and record the history of this scaler."""
        if model is not None and self.model is None:
            self._model = weakref.ref(model)
        if scaler is not None:
            recording(scaler, self.model)

    @property
    def model(self) -> nn.Module | None:
        """The model; None without one, or if it was garbage-collected."""
        return None if self._model is None else self._model()

    @property
    def path(self) -> Path | None:
        """The file that this process writes."""
        return None if self._file is None else self._file.path

    @property
    def history(self) -> RunHistory:
        """The steps so far."""
        return RunHistory(without_lost_steps(self._records) if self._file is None else self._file.read())

    @contextmanager
    def step(self, rerun: Callable[[], Any] | None = None) -> Iterator["StepLog"]:
        """Record a step: a context manager, for one call of ``optimizer.step()`` with all that leads to it.

        Args:
            rerun: a function that computes the loss and calls backward as the step did. If the scaler skips the step,
                it is called to find the first op that produced inf or nan, with the random numbers of the step and the
                same weights; gradients and buffers of the log's model are restored afterwards. If it raises, polycast
                warns. In a distributed run, pass it in all processes or in none.

        Raises:
            TypeError: `rerun` is not callable.
            ValueError: there is a `rerun`, but no model.
            FileExistsError, OSError: see :class:`RunLog`.
            RuntimeError: another step of this log has not ended; or see :class:`RunLog`.
        """
        self._check_step(rerun)
        number = self._open()
        step = StepLog(self.model, rerun)
        self._is_in_step = True
        try:
            began = time.perf_counter()
            with ExitStack() as stack:
                listeners.add(step, threading.get_ident())
                stack.callback(listeners.remove, step)
                if self._is_observed(number):
                    step.observed = observe_step(self.model, **self._options)
                    self.observation = stack.enter_context(step.observed)
                yield step
        except BaseException:
            if step.has_values:  # what an interrupted step has recorded is kept
                self._add_interrupted(step, number, time.perf_counter() - began)
            raise
        finally:
            self._is_in_step = False
        self._add(step.record(number, time.perf_counter() - began))

    def _is_observed(self, number: int) -> bool:
        if self._is_scheduled is not None and self._is_scheduled(number):
            return True
        return self._follows_skipped and self._options["nonfinite"] == "record"

    def _check_step(self, rerun: Callable[[], Any] | None) -> None:
        if rerun is not None and not callable(rerun):
            raise TypeError(f"rerun must be a function without arguments or None, got {rerun!r:.100}")
        if rerun is not None and self.model is None:
            what = "has none" if self._model is None else "was deleted: the log holds it weakly"
            raise ValueError(
                f"a rerun restores the gradients of the log's model, which {what}. Pass model= to RunLog, with all "
                "modules that the step trains, or call watch(model)."
            )
        if self._is_in_step:
            raise RuntimeError(
                f"step {self._next or 0} of this log has not ended: record a step at a time, and use a log in one "
                "training loop"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the model, which is held weakly, and the observation."""
        return {**vars(self), "_model": None, "observation": None, "_is_in_step": False, "_computed_by": None}

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
        if self._file is not None and not self._is_open:
            steps = self._file.open(resume=self._resume)
            self._next = steps if self._next is None else self._next
            self._is_open = self._resume = True
        return self._next or 0

    def _add_interrupted(self, step: StepLog, number: int, seconds: float) -> None:
        try:
            self._add(step.record(number, seconds))
        except Exception as error:
            warn_user(f"the step that was interrupted was not recorded: {type(error).__name__}: {error}")

    def _add(self, record: StepRecord) -> None:
        is_known = self._computed_by is not None and self._computed_by["packages"]
        if not is_known or record.fast_time_share is not None:  # other steps are to cost little
            now = computed_by() | {"date": self._date}
            if now != self._computed_by:
                self._computed_by, record = now, replace(record, computed_by=now)
        self._next = record.step + 1
        self._follows_skipped = bool(record.skipped)
        if self._file is None:
            self._records.append(record)
        else:
            self._file.append(record)
        if self._writer is not None:
            write_scalars(self._writer, scalars_of_step(record), record.step)
