"""Group the skipped steps of a run that follow each other for the same reason."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from polycast.common.plain_text import in_ascii
from polycast.region.scaler_history import SkippedStep

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


def skipped_rows(steps: Iterable[StepRecord]) -> list[SkippedRow]:
    """Return the skipped steps of a run, grouped."""
    rows: list[SkippedRow] = []
    for record in steps:
        if record.skip is None:
            continue
        first = last = replace(record.skip, step=record.step)
        if rows and rows[-1].last.step == last.step - 1 and _cause(rows[-1].last) == _cause(last):
            first = rows.pop().first
        rows.append(SkippedRow(first, last))
    return rows


def _cause(skip: SkippedStep) -> tuple[Any, ...]:
    return skip.parameters, skip.count, None if skip.origin is None else skip.origin.text
