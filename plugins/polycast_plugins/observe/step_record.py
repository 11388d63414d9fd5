"""`StepRecord`: the record of a training step, and its line in a file of JSON lines."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polycast.common.strict_json import jsonable
from polycast.region.scaler_history import SkippedStep, skip_from_dict, skip_to_dict

NUMBERS = ("loss", "scale", "seconds", "fast_time_share", "underflow_share", "gradient_underflow_share")
"""The fields that are floats or None."""


@dataclass(frozen=True)
class StepRecord:
    """A training step. A field is None if it was not recorded.

    Attributes:
        step: the number of the step, from 0.
        loss: the loss.
        scale: the scale of the gradient scaler in this step.
        skipped: whether the scaler skipped the step; if there are several, whether one of them did.
        seconds: the time of the step.
        fast_time_share: the share of the time in ops that ops in a fast dtype took; this and the following are those
            of observed steps.
        underflow_share: the share of the values that were computed or cast which became zero or subnormal.
        gradient_underflow_share: the same of the backward pass.
        skip: of a skipped step, the parameters with non-finite gradients, and the first op that produced inf or nan.
    """

    step: int
    loss: float | None = None
    scale: float | None = None
    skipped: bool | None = None
    seconds: float | None = None
    fast_time_share: float | None = None
    underflow_share: float | None = None
    gradient_underflow_share: float | None = None
    skip: SkippedStep | None = None

    @property
    def diverged(self) -> bool:
        """Whether the loss is inf or nan."""
        return self.loss is not None and not math.isfinite(self.loss)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values of what was recorded; inf and nan, which JSON lacks, are text: ``"nan"``."""
        values = {name: getattr(self, name) for name in ("step", *NUMBERS, "skipped")}
        values["skip"] = None if self.skip is None else skip_to_dict(self.skip)
        return {name: jsonable(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "StepRecord":
        """Return the record with the values of :meth:`to_dict`; unknown ones, which a later version wrote, are ignored.

        Raises:
            ValueError: these are not the values of a step.
        """
        try:
            step, skipped, skip = values["step"], values.get("skipped"), values.get("skip")
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(f"step must be an int of at least 0, got {step!r}")
            if skipped is not None and not isinstance(skipped, bool):
                raise ValueError(f"skipped must be true or false, got {skipped!r}")
            numbers = {name: float(values[name]) for name in NUMBERS if values.get(name) is not None}
            read = None if skip is None else skip_from_dict(skip)
            return cls(step=step, skipped=skipped, skip=read, **numbers)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"it is not a step: {type(error).__name__}: {error}") from error


def without_lost_steps(records: Iterable[StepRecord]) -> list[StepRecord]:
    """Return records without the steps that a run lost when it went on from a checkpoint, with a lower step."""
    kept: list[StepRecord] = []
    for record in records:
        while kept and kept[-1].step >= record.step:
            kept.pop()
        kept.append(record)
    return kept


def line_of(record: StepRecord) -> str:
    """Return the line of a record in a file, with its end."""
    return json.dumps(record.to_dict(), allow_nan=False) + "\n"


def records_of(lines: Iterable[str]) -> Iterator[StepRecord]:
    """Yield the records of a file's lines. The last line may be incomplete, because a process was killed as it wrote.

    Raises:
        ValueError: a line is not a step.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield StepRecord.from_dict(json.loads(line))
        except (ValueError, RecursionError) as error:
            if _is_beginning_of_step(line):
                return
            raise ValueError(f"line {number}: {error}") from error


def _is_beginning_of_step(line: str) -> bool:
    """Return whether a line is an incomplete one of :func:`line_of`."""
    first = '{"step": '
    begun = line.rstrip("\0")  # a power failure leaves zeros
    return not line.endswith(("\n", "}")) and (begun.startswith(first) or first.startswith(begun))
