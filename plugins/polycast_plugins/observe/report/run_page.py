"""The contents of a page for one training run, or two side by side, before it is rendered."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ..run_findings import RunFinding, findings_of_run, skipped_rows, with_references
from ..steps import SkippedStep, StepRecord

WIDTH, HEIGHT = 1000, 100
_MAX_ROWS, _MAX_STEPS, _MAX_SKIPPED = 60, 1000, 100
_MAX_POINTS = 800
_LOG_RATIO = 100
"""The ratio between the largest and the smallest value from which an axis is logarithmic."""
_Run: TypeAlias = Sequence[StepRecord]
_Position: TypeAlias = Callable[[Any], float]


@dataclass(frozen=True)
class Line:
    """The numbers of one run: a path as in SVG, the positions of inf, nan and skipped steps, and the ends as text."""

    path: str
    nonfinite: tuple[int, ...]
    marks: tuple[int, ...]
    first: str
    last: str
    nonfinite_count: int


@dataclass(frozen=True)
class Chart:
    """A chart of a field with a line for each run; `ticks` are the labels of its axis from top to bottom."""

    name: str
    title: str
    about: str
    ticks: tuple[str, ...]
    is_log: bool
    lines: tuple[Line, ...]


class _Kind(NamedTuple):
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


_KINDS = (
    _Kind("loss", "Loss", "Of each step.", marks=True),
    _Kind("scale", "Scale", "The factor of the loss.", "log", marks=True),
    _Kind("fast_time_share", "Time in fast dtypes", "The share of the time in ops, on observed steps.", "share"),
    _Kind("underflow_share", "Underflow", "The share of values that became zero or subnormal.", "share"),
    _Kind("gradient_underflow_share", "Underflow of gradients", "The same, in the backward pass.", "share"),
)


def charts_of(runs: Sequence[_Run]) -> tuple[Chart, ...]:
    """Return the charts of the numbers that some run has."""
    return tuple(_chart(kind, runs) for kind in _KINDS if any(_numbers(run, kind.name) for run in runs))


def _numbers(run: Iterable[StepRecord], name: str) -> list[tuple[int, float]]:
    """Return the numbers of a field by step, without the steps that lack it."""
    return [(record.step, float(value)) for record in run if (value := getattr(record, name)) is not None]


def text_of(value: float, is_share: bool) -> str:
    """Format a number of a chart."""
    if not math.isfinite(value):
        return str(value)
    if is_share:
        return f"{value:.0%}" if value >= 0.1 or not value else f"{value:.2%}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _span(runs: Iterable[_Run]) -> tuple[int, int]:
    """Return the first and the last step of all runs."""
    steps = [record.step for run in runs for record in (*run[:1], *run[-1:])]
    return (min(steps), max(steps)) if steps else (0, 0)


def _chart(kind: _Kind, runs: Sequence[_Run]) -> Chart:
    of_runs = [_numbers(run, kind.name) for run in runs]
    finite = [value for numbers in of_runs for _, value in numbers if math.isfinite(value)]
    low, high, is_log = _axis(kind.axis, finite)
    first, last = _span(runs)

    def across(step: int) -> float:
        return WIDTH * (step - first) / (last - first) if last > first else WIDTH / 2

    def down(value: float) -> float:
        position = math.log(max(value, low) / low) / math.log(high / low) if is_log else (value - low) / (high - low)
        return HEIGHT * (1 - min(max(position, 0.0), 1.0))

    def line(run: _Run, numbers: list[tuple[int, float]]) -> Line:
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


def _path(numbers: list[tuple[int, float]], across: _Position, down: _Position, *, is_stepped: bool) -> str:
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


class FoundInRun(NamedTuple):
    """A finding, and which of two runs has it: ``"before"`` or ``"after"``; empty: there is one run."""

    finding: RunFinding
    run: str


class StepRow(NamedTuple):
    """A row of the table of steps: a text for each run and number."""

    step: int
    of: tuple[tuple[str, ...], ...]


class SkippedText(NamedTuple):
    """Skipped steps in a row as text, such as ``"21 to 24"``, the first of them, and the run that has them."""

    run: str
    steps: str
    scale: str
    skip: SkippedStep


@dataclass(frozen=True)
class RunPage:
    """The contents of a page.

    Attributes:
        runs: the summary of each run, as texts by their labels; the run before first.
        missing: the titles of the charts that no run has numbers for.
        titles: the titles of the numbers, in the order of those in `rows` and `data`.
        rows: some steps, evenly chosen.
        skipped: the skipped steps; at most 100 rows for each run, of `skips` rows.
        steps: how many steps there are, in one run or both.
        data: for the script: the steps, and for each run and number the texts at these.
    """

    runs: tuple[dict[str, str], ...]
    found: tuple[FoundInRun, ...]
    charts: tuple[Chart, ...]
    missing: tuple[str, ...]
    titles: tuple[str, ...]
    rows: tuple[StepRow, ...]
    skipped: tuple[SkippedText, ...]
    skips: int
    steps: int
    first: int
    last: int
    data: dict[str, Any]

    @property
    def compares(self) -> bool:
        """Whether there are two runs."""
        return len(self.runs) == 2


def run_page_of(runs: Sequence[_Run]) -> RunPage:
    """Return the contents of the page of a run, or of a run before and one after."""
    charts = charts_of(runs)
    shown = tuple(chart.name for chart in charts)
    names = ("before", "after") if len(runs) == 2 else ("",)
    first, last = _span(runs)
    by_step = [{record.step: record for record in run} for run in runs]
    skips = [list(_skip_rows(name, run)) for name, run in zip(names, runs, strict=True)]
    return RunPage(
        runs=tuple(map(_summary, runs)),
        found=tuple(
            FoundInRun(finding, name)
            for run, name in reversed([*zip(runs, names, strict=True)])
            for finding in with_references(findings_of_run(run))
        ),
        charts=charts,
        missing=tuple(kind.title for kind in _KINDS if kind.name not in shown),
        titles=tuple(chart.title for chart in charts),
        rows=tuple(StepRow(step, _texts(by_step, step, shown)) for step in _chosen(runs, _MAX_ROWS)),
        skipped=tuple(each for of_run in skips for each in of_run[:_MAX_SKIPPED]),
        skips=sum(map(len, skips)),
        steps=len({record.step for run in runs for record in run}),
        first=first,
        last=last,
        data={
            "charts": shown,
            "steps": [[step, *_texts(by_step, step, shown)] for step in _chosen(runs, _MAX_STEPS)],
        },
    )


def _skip_rows(name: str, run: _Run) -> Iterator[SkippedText]:
    for row in skipped_rows(run):
        steps = dict.fromkeys((f"{row.first.step:,}", f"{row.last.step:,}"))
        scales = dict.fromkeys((text_of(row.first.scale, False), text_of(row.last.scale, False)))
        yield SkippedText(name, " to ".join(steps), " to ".join(scales), row.first)


def _texts(by_step: Sequence[dict[int, StepRecord]], step: int, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return for each run the numbers of a step; empty: not recorded."""

    def text(record: StepRecord | None, name: str) -> str:
        value = None if record is None else getattr(record, name)
        skipped = ", skipped" if name == "scale" and record is not None and record.skipped else ""
        return "" if value is None else text_of(float(value), name.endswith("_share")) + skipped

    return tuple(tuple(text(of_run.get(step), name) for name in names) for of_run in by_step)


def _chosen(runs: Sequence[_Run], most: int) -> list[int]:
    """Return steps, evenly chosen: all if they are few."""
    steps = sorted({record.step for run in runs for record in run})
    if len(steps) <= most:
        return steps
    return [steps[round(number * (len(steps) - 1) / (most - 1))] for number in range(most)]


def _summary(run: _Run) -> dict[str, str]:
    """Return the numbers of a run, as text; empty: not recorded. Shares and times are means."""
    losses, scales = _numbers(run, "loss"), _numbers(run, "scale")
    finite = [(value, step) for step, value in losses if math.isfinite(value)]
    known = [record for record in run if record.skipped is not None]
    skips = sum(record.skipped is True for record in run)
    return {
        "Steps": f"{len(run):,}",
        "Loss": _first_to_last(losses),
        "Lowest loss": f"{text_of(min(finite)[0], False)} in step {min(finite)[1]:,}" if finite else "",
        "Skipped steps": f"{skips:,} ({skips / len(known):.1%})" if known else "",
        "Scale": _first_to_last(scales),
        "Time in fast dtypes": _mean(run, "fast_time_share"),
        "Underflow": _mean(run, "underflow_share"),
        "Underflow of gradients": _mean(run, "gradient_underflow_share"),
        "Time of a step": _mean(run, "seconds"),
        **_machine(run),
    }


def _machine(run: _Run) -> dict[str, str]:
    """Return what computed the last steps, as text."""
    by = next((record.computed_by for record in reversed(run) if record.computed_by), {})
    devices = [f"{device} ({name})" for device, name in by.get("processors", {}).items()]
    return {
        "Device": ", ".join([*devices, f"threads: {by['num_threads']}"]) if "num_threads" in by else "",
        "Versions": ", ".join(f"{name} {version}" for name, version in by.get("versions", {}).items()),
        "Run": f"{by['date']}: {by.get('command', '')}" if "date" in by else "",
    }


def _first_to_last(numbers: Sequence[tuple[int, float]]) -> str:
    ends = [text_of(value, False) for _, value in (*numbers[:1], *numbers[-1:])]
    return " to ".join(dict.fromkeys(ends))


def _mean(run: _Run, name: str) -> str:
    values = [value for _, value in _numbers(run, name) if math.isfinite(value)]
    if not values:
        return ""
    mean = sum(values) / len(values)
    return f"{mean * 1e3:.3g} ms" if name == "seconds" else text_of(mean, True)
