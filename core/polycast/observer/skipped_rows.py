"""Group the skipped steps of a run that follow each other for the same reason."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..common.plain_text import in_ascii
from ..region.scaler_history import SkippedStep
from .step_record import StepRecord


@dataclass(frozen=True)
class SkippedRow:
    """Skipped steps in a row that have the same parameters and origin.

    Attributes:
        first, last: the first and the last of them.
    """

    first: SkippedStep
    last: SkippedStep

    def __str__(self) -> str:
        if self.first.step == self.last.step:
            return str(self.first)
        scales = " to ".join(dict.fromkeys(f"{skip.scale:g}" for skip in (self.first, self.last)))
        return in_ascii(f"steps {self.first.step} to {self.last.step}, scale {scales}{self.first.cause}")


def skipped_rows(steps: Iterable[StepRecord]) -> Iterator[SkippedRow]:
    """Yield the skipped steps of a run, grouped."""
    row: SkippedRow | None = None
    for record in steps:
        if record.skip is None:
            continue
        skip = replace(record.skip, step=record.step)
        if row is not None and row.last.step == skip.step - 1 and _cause(row.last) == _cause(skip):
            row = SkippedRow(row.first, skip)
        else:
            if row is not None:
                yield row
            row = SkippedRow(skip, skip)
    if row is not None:
        yield row


def _cause(skip: SkippedStep) -> tuple[Any, ...]:
    return skip.parameters, skip.count, None if skip.origin is None else skip.origin.text
