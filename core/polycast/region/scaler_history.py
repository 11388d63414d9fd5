"""The history of a gradient scaler: its scale, the steps that it skipped, and why."""

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..common.plain_text import in_ascii
from ..common.strict_json import jsonable

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
