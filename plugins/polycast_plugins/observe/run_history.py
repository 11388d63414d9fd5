"""`RunHistory`: the steps of a training run, as a value to read, plot, save and export."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from polycast.plugin import Result

from .conversions import Writer, check_writer, scalars_of_step, write_scalars
from .run_findings import RunFinding, findings_of_run, skipped_rows, with_references
from .steps import SkippedStep, StepRecord, line_of, records_of, without_lost_steps

_Path: TypeAlias = str | os.PathLike[str]
_MAX_SHOWN = 10


class RunHistory(Result):
    """The steps of a training run that a :class:`polycast.RunLog` recorded.

    Args:
        steps: the records, in any order. If a step has several, the last one counts.

    Example:
        >>> import polycast
        >>> log = polycast.RunLog()
        >>> for loss in (2.0, 1.0):
        ...     with log.step() as step:
        ...         step.log(loss=loss)
        >>> [record.loss for record in log.history.steps]
        [2.0, 1.0]
    """

    def __init__(self, steps: Iterable[StepRecord] = ()) -> None:
        by_step = {record.step: record for record in steps}
        self.steps: tuple[StepRecord, ...] = tuple(by_step[step] for step in sorted(by_step))
        """The records, in order."""

    @property
    def skipped(self) -> tuple[SkippedStep, ...]:
        """The steps that the scaler skipped, with the model's parameter names."""
        return tuple(record.skip for record in self.steps if record.skip is not None)

    @property
    def findings(self) -> tuple[RunFinding, ...]:
        """Problems of the run, with remedies."""
        return findings_of_run(self.steps)

    def save(self, path: _Path) -> None:
        """Write the steps to a file of JSON lines, one for each.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text("".join(map(line_of, self.steps)), encoding="utf-8")

    @classmethod
    def load(cls, path: _Path) -> "RunHistory":
        """Return the history in a file that :meth:`save` or a :class:`polycast.RunLog` wrote.

        A last line that a killed process has not finished is ignored. Where the run went on from a checkpoint, the
        steps that it did again replace the lost ones.

        Raises:
            OSError: the file cannot be read.
            ValueError: a line is not a step.
        """
        try:
            with open(path, encoding="utf-8") as lines:
                return cls(without_lost_steps(records_of(lines)))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error

    def to_html(self, path: _Path, *, before: "RunHistory | None" = None) -> None:
        """Write a page with the run over its steps: one HTML file that loads nothing else.

        It shows loss, scale, skipped steps, the share of time in fast dtypes, and underflow.

        Args:
            path: the file.
            before: a run to compare with, shown side by side.

        Raises:
            OSError: the file cannot be written.
            TypeError: `before` is not a history.
        """
        if before is not None and not isinstance(before, RunHistory):
            raise TypeError(f"before must be a polycast.RunHistory or None, got {type(before).__name__}")
        from . import report  # imported here for Jinja2, which only reports need

        runs = (self.steps,) if before is None else (before.steps, self.steps)
        text = report.render_run(report.run_page_of(runs))
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")

    def log_to(self, writer: Writer) -> None:
        """Write the steps as scalars, for TensorBoard; see :meth:`~polycast_plugins.observe.Observation.log_to`.

        Raises:
            TypeError: `writer` has no ``add_scalar``.
        """
        check_writer(writer)
        for record in self.steps:
            write_scalars(writer, scalars_of_step(record), record.step)

    def __len__(self) -> int:
        return len(self.steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunHistory) and self.steps == other.steps

    __hash__ = object.__hash__

    def lines(self) -> list[str]:
        """Return the ends of the loss, the last skipped steps and the findings."""
        losses = [record for record in self.steps if record.loss is not None]
        ends = f", loss {losses[0].loss:g} to {losses[-1].loss:g}" if losses else ""
        skips = sum(record.skipped is True for record in self.steps)
        lines = [f"{len(self.steps)} steps{ends}, {skips} skipped"]
        lines += [f"  {row}" for row in skipped_rows(self.steps)[-_MAX_SHOWN:]]
        return [*lines, *map(str, with_references(self.findings))]

    def __repr__(self) -> str:
        return f"<RunHistory of {len(self.steps)} steps>"
