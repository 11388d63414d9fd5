"""Charts of a run's numbers over its steps, as paths in a box of 1000 by 100."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..step_record import StepRecord

WIDTH, HEIGHT = 1000, 100
_MAX_POINTS = 800
_LOG_RATIO = 100
"""The ratio between the largest and the smallest value from which an axis is logarithmic."""


@dataclass(frozen=True)
class Line:
    """The numbers of one run.

    Attributes:
        path: of the finite numbers, as in SVG.
        nonfinite: the positions of inf and nan, from left to right.
        marks: the positions of the skipped steps.
        first, last: the first and the last number, as text; empty without numbers.
        nonfinite_count: how many are inf or nan.
    """

    path: str
    nonfinite: tuple[int, ...]
    marks: tuple[int, ...]
    first: str
    last: str
    nonfinite_count: int


@dataclass(frozen=True)
class Chart:
    """A chart with a line for each run.

    Attributes:
        name, title, about: the name of the field, the title and an explanation.
        ticks: the labels of the axis from top to bottom.
        is_log: whether the axis is logarithmic.
        lines: one for each run.
    """

    name: str
    title: str
    about: str
    ticks: tuple[str, ...]
    is_log: bool
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class ChartKind:
    """A number that is charted.

    Attributes:
        name: the field of :class:`StepRecord`.
        axis: ``"share"``: from 0 up, in per cent; ``"log"``; ``"auto"``: logarithmic if the numbers need it.
        marks: whether skipped steps are marked.
    """

    name: str
    title: str
    about: str
    axis: str = "auto"
    marks: bool = False


KINDS = (
    ChartKind("loss", "Loss", "Of each step.", marks=True),
    ChartKind("scale", "Scale", "The factor of the loss.", "log", marks=True),
    ChartKind("fast_time_share", "Time in fast dtypes", "The share of the time in ops, on observed steps.", "share"),
    ChartKind("underflow_share", "Underflow", "The share of values that became zero or subnormal.", "share"),
    ChartKind("gradient_underflow_share", "Underflow of gradients", "The same, in the backward pass.", "share"),
)


def charts_of(runs: Sequence[Sequence[StepRecord]]) -> tuple[Chart, ...]:
    """Return the charts of the numbers that some run has."""
    return tuple(_chart(kind, runs) for kind in KINDS if any(numbers_of(run, kind.name) for run in runs))


def numbers_of(run: Iterable[StepRecord], name: str) -> list[tuple[int, float]]:
    """Return the numbers of a field by step, without the steps that lack it."""
    return [(record.step, float(value)) for record in run if (value := getattr(record, name)) is not None]


def text_of(value: float, is_share: bool) -> str:
    """Format a number of a chart."""
    if not math.isfinite(value):
        return str(value)
    if is_share:
        return f"{value:.0%}" if value >= 0.1 or not value else f"{value:.2%}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def span_of(runs: Iterable[Sequence[StepRecord]]) -> tuple[int, int]:
    """Return the first and the last step of all runs."""
    steps = [record.step for run in runs for record in (*run[:1], *run[-1:])]
    return (min(steps), max(steps)) if steps else (0, 0)


def _chart(kind: ChartKind, runs: Sequence[Sequence[StepRecord]]) -> Chart:
    of_runs = [numbers_of(run, kind.name) for run in runs]
    finite = [value for numbers in of_runs for _, value in numbers if math.isfinite(value)]
    low, high, is_log = _axis(kind.axis, finite)
    first, last = span_of(runs)

    def across(step: int) -> float:
        return WIDTH * (step - first) / (last - first) if last > first else WIDTH / 2

    def down(value: float) -> float:
        position = math.log(max(value, low) / low) / math.log(high / low) if is_log else (value - low) / (high - low)
        return HEIGHT * (1 - min(max(position, 0.0), 1.0))

    def line(run: Sequence[StepRecord], numbers: list[tuple[int, float]]) -> Line:
        bad = [step for step, value in numbers if not math.isfinite(value)]
        skipped = [record.step for record in run if record.skipped] if kind.marks else []
        texts = [text_of(value, kind.axis == "share") for _, value in (numbers[:1] + numbers[-1:])]
        return Line(
            path=_path(list(_thinned(numbers)), across, down, is_stepped=kind.name == "scale"),
            nonfinite=tuple(sorted({round(across(step)) for step in bad})),
            marks=tuple(sorted({round(across(step)) for step in skipped})),
            first=texts[0] if texts else "",
            last=texts[-1] if texts else "",
            nonfinite_count=len(bad),
        )

    middle = math.sqrt(low * high) if is_log else (low + high) / 2
    ticks = tuple(text_of(value, kind.axis == "share") for value in (high, middle, low))
    lines = tuple(line(run, numbers) for run, numbers in zip(runs, of_runs, strict=True))
    return Chart(kind.name, kind.title, kind.about, ticks, is_log, lines)


def _axis(axis: str, values: list[float]) -> tuple[float, float, bool]:
    """Return the least and the largest value of an axis, and whether it is logarithmic."""
    if axis == "share":
        return 0.0, max([*values, 0.01]), False
    low, high = min(values, default=0.0), max(values, default=1.0)
    positive = [value for value in values if value > 0]
    if positive and (axis == "log" or (len(positive) == len(values) and high > _LOG_RATIO * low)):
        least, most = min(positive), max(positive)
        return (least / 2, most * 2, True) if least == most else (least, most, True)
    if low == high:
        return low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2, False
    return low, high, False


def _thinned(numbers: list[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    """Yield few enough numbers for a path: of many, the smallest and the largest of each stretch, and all breaks."""
    if len(numbers) <= _MAX_POINTS:
        yield from numbers
        return
    size = math.ceil(2 * len(numbers) / _MAX_POINTS)
    for start in range(0, len(numbers), size):
        stretch = numbers[start : start + size]
        finite = [each for each in stretch if math.isfinite(each[1])]
        if len(finite) < len(stretch):
            yield next(each for each in stretch if not math.isfinite(each[1]))
        ends = {min(finite, key=lambda each: each[1]), max(finite, key=lambda each: each[1])} if finite else ()
        yield from sorted(ends)


def _path(
    numbers: list[tuple[int, float]],
    across: Callable[[int], float],
    down: Callable[[float], float],
    *,
    is_stepped: bool,
) -> str:
    """Return a line through numbers, with gaps where these are inf or nan; a stepped one changes at a step at once."""
    parts: list[str] = []
    joined = False
    for step, value in numbers:
        if not math.isfinite(value):
            joined = False
            continue
        x, y = f"{across(step):.1f}", f"{down(value):.1f}"
        if not joined:
            parts.append(f"M{x} {y}h.1")
        else:
            parts.append(f"H{x}V{y}" if is_stepped else f"L{x} {y}")
        joined = True
    return "".join(parts)
