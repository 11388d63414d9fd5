"""Steps of a program: the schedule that selects those to observe, and the records of training steps."""

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeAlias

from polycast.errors import warn_user

from .records import Origin, in_ascii

Schedule: TypeAlias = Callable[[int], Any]
"""A function of the number of a step, as ``torch.profiler.schedule`` returns."""

_LOOKED_AT = 10_000


def _is_multiple(number: int, step: int) -> bool:
    return step % number == 0


def _records(schedule: Schedule, step: int) -> bool:
    return "RECORD" in getattr(schedule(step), "name", "")


def read_schedule(schedule: Schedule | int) -> Callable[[int], bool]:
    """Return a function, which can be pickled, that returns whether a step is observed.

    Raises:
        TypeError: `schedule` is neither callable nor an int.
        ValueError: it observes no step.
    """
    if isinstance(schedule, int) and not isinstance(schedule, bool):
        if schedule < 1:
            raise ValueError(f"schedule must be at least 1 (each step), or None, got {schedule}")
        return functools.partial(_is_multiple, schedule)
    if not callable(schedule):
        raise TypeError(
            f"schedule must be an int n (every n-th step), torch.profiler.schedule(...) or None, got {schedule!r:.100}"
        )
    is_observed = functools.partial(_records, schedule)
    if not any(map(is_observed, range(_LOOKED_AT))):
        raise ValueError(
            f"schedule={schedule!r:.100} observes none of the first {_LOOKED_AT:,} steps: it must return "
            "torch.profiler.ProfilerAction.RECORD for some"
        )
    return is_observed


class Steps:
    """Counts the steps of a program; `schedule` selects those to observe, None: all. Raises as `read_schedule`."""

    def __init__(self, schedule: Schedule | int | None) -> None:
        self._selects = read_schedule(1 if schedule is None else schedule)
        self.ended = 0
        """The steps that have ended."""
        self.observed = 0
        """Those that were observed."""
        self.is_observed = self._selects(0)
        """Whether the step that runs is observed."""

    def next(self) -> None:
        """End a step, and begin the next one."""
        self.ended += 1
        self.observed += self.is_observed
        self.is_observed = self._selects(self.ended)

    def warn_if_unobserved(self) -> None:
        """Warn if the schedule has selected none of the steps."""
        if self.observed or self.is_observed:
            return
        remedy = (
            "Lower the number of steps that it waits or skips."
            if self.ended
            else "Call step() of the observation after each training step: seen.step()."
        )
        warn_user(f"nothing was observed: the schedule selects none of the steps 0 to {self.ended}. {remedy}")


MAX_NAMES = 20
"""The number of parameters that a history names of a skipped step."""
_MAX_SHOWN = 10


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
    return asdict(skip) | {"scale": jsonable(skip.scale)}


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
        computed_by: in the first step that a process records, and in others when it has changed: ``engine``,
            ``versions``, ``packages``, ``processors``, ``num_threads``, ``date`` and ``command``, as in a ``Run``.
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
    computed_by: Mapping[str, Any] | None = field(default=None, hash=False)

    @property
    def diverged(self) -> bool:
        """Whether the loss is inf or nan."""
        return self.loss is not None and not math.isfinite(self.loss)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values of what was recorded; inf and nan, which JSON lacks, are text: ``"nan"``."""
        values = {name: getattr(self, name) for name in ("step", *NUMBERS, "skipped")}
        values["skip"] = None if self.skip is None else skip_to_dict(self.skip)
        values["computed_by"] = self.computed_by
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
            by = values.get("computed_by")
            if by is not None and not isinstance(by, Mapping):
                raise ValueError(f"computed_by must be a mapping, got {by!r:.100}")
            numbers = {name: float(values[name]) for name in NUMBERS if values.get(name) is not None}
            read = None if skip is None else skip_from_dict(skip)
            return cls(step=step, skipped=skipped, skip=read, computed_by=by, **numbers)
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


_TEXT = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)')
"""A string of JSON, which may have braces, or the beginning of one at the end."""


def _is_beginning_of_step(line: str) -> bool:
    """Return whether a line is an incomplete one of :func:`line_of`."""
    first = '{"step": '
    begun = line.rstrip("\0")  # a power failure leaves zeros
    bare = _TEXT.sub("", line)
    is_whole = bare.endswith("}") and bare.count("{") == bare.count("}")
    return not line.endswith("\n") and not is_whole and (begun.startswith(first) or first.startswith(begun))
