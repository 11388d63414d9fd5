"""The contents of a page for one training run, or two side by side, before it is rendered."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from polycast.region.scaler_history import SkippedStep

from ..run_findings import RunFinding, findings_of_run
from ..skipped_rows import skipped_rows
from ..step_record import StepRecord
from .charts import KINDS, Chart, charts_of, numbers_of, span_of, text_of

_MAX_ROWS = 60
_MAX_STEPS = 1000
_MAX_SKIPPED = 100
_Run = Sequence[StepRecord]


@dataclass(frozen=True)
class FoundInRun:
    """A finding, and which of two runs has it: ``"before"`` or ``"after"``; empty: it is one run, or both have it."""

    finding: RunFinding
    run: str


@dataclass(frozen=True)
class StepRow:
    """A row of the table of steps: a text for each run and number."""

    step: int
    of: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class SkippedText:
    """A SkippedRow as text, and the run that has it.

    Attributes:
        run: ``"before"`` or ``"after"``; empty: there is one run.
        steps, scale: such as ``"21 to 24"``.
        skip: the first of them.
    """

    run: str
    steps: str
    scale: str
    skip: SkippedStep


@dataclass(frozen=True)
class RunPage:
    """The contents of a page.

    Attributes:
        runs: the summary of each run, as texts by their labels; the run before first.
        found: the findings.
        charts: the charts.
        missing: the titles of the charts that no run has numbers for.
        titles: the titles of the numbers, in the order of those in `rows` and `data`.
        rows: some steps, evenly chosen.
        skipped: the skipped steps; at most 100 rows for each run.
        skips: how many rows there are.
        steps: how many steps there are, in one run or both.
        first, last: the first and the last step.
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
    first, last = span_of(runs)
    by_step = [{record.step: record for record in run} for run in runs]
    skips = [list(_skip_rows(name, run)) for name, run in zip(names, runs, strict=True)]
    return RunPage(
        runs=tuple(map(_summary, runs)),
        found=tuple(_found(runs, names)),
        charts=charts,
        missing=tuple(kind.title for kind in KINDS if kind.name not in shown),
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


def _found(runs: Sequence[_Run], names: Sequence[str]) -> Iterator[FoundInRun]:
    for run, name in reversed([*zip(runs, names, strict=True)]):
        yield from (FoundInRun(finding, name) for finding in findings_of_run(run))


def _summary(run: _Run) -> dict[str, str]:
    """Return the numbers of a run, as text; empty: not recorded. Shares and times are means."""
    losses, scales = numbers_of(run, "loss"), numbers_of(run, "scale")
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
    }


def _first_to_last(numbers: Sequence[tuple[int, float]]) -> str:
    ends = [text_of(value, False) for _, value in (*numbers[:1], *numbers[-1:])]
    return " to ".join(dict.fromkeys(ends))


def _mean(run: _Run, name: str) -> str:
    values = [value for _, value in numbers_of(run, name) if math.isfinite(value)]
    if not values:
        return ""
    mean = sum(values) / len(values)
    return f"{mean * 1e3:.3g} ms" if name == "seconds" else text_of(mean, True)
