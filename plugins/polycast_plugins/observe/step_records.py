"""The records of training steps: those that a gradient scaler skipped, and those of a run log."""

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from .records import in_ascii

MAX_SKIPPED = 1000
"""The number of skipped steps that a history keeps: the latest."""
MAX_NAMES = 20
"""The number of parameters that it names of a skipped step."""
_MAX_SHOWN = 10


@dataclass(frozen=True)
class Origin:
    """The first op of a step that turned finite inputs into inf or nan.

    Attributes:
        op: the name in the dispatcher: ``"aten::mm"``.
        phase: ``"forward"`` or ``"backward"``.
        module: the module that called it; None: none of the model's.
        what: ``"inf"``, ``"nan"`` or ``"inf and nan"``.
        dtype: the dtype of its output.
        stack: the Python stack of the call, innermost last; empty unless it was asked for.
    """

    op: str
    phase: str
    module: str | None
    what: str
    dtype: str
    stack: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The op, module, pass and dtype; ``str()`` of the origin is the same in ASCII."""
        where = "outside of the model" if self.module is None else f"in {self.module or 'the model'!r}"
        return f"{self.op} {where} ({self.phase}, {self.dtype}): {self.what}"

    def __str__(self) -> str:
        return in_ascii(self.text)


@dataclass(frozen=True)
class SkippedStep:
    """A step that a gradient scaler skipped.

    Attributes:
        step: the number of the step, from 0: how often ``update`` was called before.
        scale: the scale of the step.
        parameters: the parameters with non-finite gradients, the nearest to the loss (the last ones of the model)
            first, at most 20. They have the names of the model or of the optimizer; without either, such as
            ``"group 0, parameter 3 (64, 64)"``.
        count: the number of these parameters; None: unknown, because a fused optimizer skipped the step on its device.
        of: the number of parameters with gradients; None: unknown.
        origin: the first op that produced inf or nan; None: nothing observed the step, see ``polycast.RunLog``.
    """

    step: int
    scale: float
    parameters: tuple[str, ...] = ()
    count: int | None = None
    of: int | None = None
    origin: Origin | None = None

    def __str__(self) -> str:
        return in_ascii(f"step {self.step}, scale {self.scale:g}{self.cause}")

    @property
    def cause(self) -> str:
        """The parameters and the origin as text, behind a semicolon; empty if neither is known."""
        named = ", ".join(self.parameters) + (", ..." if self.count and self.count > len(self.parameters) else "")
        found = "" if self.count is None else f"; gradients of {self.count} of {self.of} parameters: {named}"
        began = "" if self.origin is None else f"; first {self.origin.text}"
        return found + began


@dataclass(frozen=True)
class ScalerHistory:
    """The history of a gradient scaler, whose size is bounded by how often the scale has changed.

    Attributes:
        steps: how often ``update`` was called.
        scales: each change of the scale, as (step, the scale from this step on).
        skips: the number of skipped steps.
        skipped: the latest 1,000 of these.
    """

    steps: int = 0
    scales: tuple[tuple[int, float], ...] = ()
    skips: int = 0
    skipped: tuple[SkippedStep, ...] = ()

    def scale_at(self, step: int) -> float | None:
        """Return the scale of a step; None: the step is before the first or not over yet."""
        before = [scale for first, scale in self.scales if first <= step < self.steps]
        return before[-1] if before else None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values; an infinite scale, which JSON lacks, is text."""
        return {
            "steps": self.steps,
            "scales": [[step, jsonable(scale)] for step, scale in self.scales],
            "skips": self.skips,
            "skipped": [skip_to_dict(each) for each in self.skipped],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ScalerHistory":
        """Return the history with the values of :meth:`to_dict`.

        Raises:
            ValueError: these are not the values of a history.
        """
        try:
            return cls(
                steps=int(values["steps"]),
                scales=tuple((int(step), float(scale)) for step, scale in values["scales"]),
                skips=int(values["skips"]),
                skipped=tuple(map(skip_from_dict, values["skipped"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"it is not the history of a scaler: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        scale = f", scale {self.scales[-1][1]:g}" if self.scales else ""
        return "\n  ".join([f"{self.steps} steps{scale}, {self.skips} skipped", *map(str, self.skipped[-_MAX_SHOWN:])])


def skip_to_dict(skip: SkippedStep) -> dict[str, Any]:
    """Return a skipped step as JSON-safe values."""
    values = asdict(skip) | {"parameters": list(skip.parameters), "scale": jsonable(skip.scale)}
    if skip.origin is not None:
        values["origin"]["stack"] = list(skip.origin.stack)
    return values


def skip_from_dict(values: Mapping[str, Any]) -> SkippedStep:
    """Return the skipped step with the values of :func:`skip_to_dict`; unknown ones are ignored."""
    origin = values.get("origin")
    if origin is not None:
        origin = Origin(**_known(Origin, {**origin, "stack": tuple(origin.get("stack", ()))}))
    known = _known(SkippedStep, {**values, "parameters": tuple(values["parameters"]), "origin": origin})
    read = SkippedStep(**known)
    return replace(read, scale=float(read.scale))


def _known(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a dataclass's fields, without those that a later version wrote."""
    return {each.name: values[each.name] for each in fields(kind) if each.name in values}


def jsonable(value: Any) -> Any:
    """Return inf and nan, which JSON lacks, as text that ``float()`` reads, and other values as they are."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class HistoryRecorder:
    """Records a history, step by step."""

    def __init__(self, history: ScalerHistory | None = None) -> None:
        history = history or ScalerHistory()
        self.steps, self._skips = history.steps, history.skips
        self._scales = list(history.scales)
        self._skipped = deque(history.skipped, MAX_SKIPPED)

    def add(self, scale: float | None, skip: SkippedStep | None) -> None:
        """Record a step: its scale, if it is known, and whether it was skipped."""
        if scale is not None and (not self._scales or self._scales[-1][1] != scale):
            self._scales.append((self.steps, scale))
        if skip is not None:
            self._skips += 1
            self._skipped.append(replace(skip, step=self.steps))
        self.steps += 1

    def history(self) -> ScalerHistory:
        """Return the history so far."""
        return ScalerHistory(self.steps, tuple(self._scales), self._skips, tuple(self._skipped))


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
