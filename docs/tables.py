"""Write the tables of pages from docs/figures/bench."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGES = (DOCS / "benchmark-tables.md", DOCS / "benchmarks.md", DOCS / "serve.md")
FIGURES = DOCS / "figures" / "bench"
_BETWEEN = re.compile(
    r"(?<=<!-- )(?P<kind>figures|qualities|sizes|times) of (?P<names>[\w -]+) -->\n.*?(?=<!-- end -->)", re.DOTALL
)
_MAX_ROWS = 12
"""Longer tables show only the rows that missed their bounds, and means."""


def run_of(name: str) -> dict[str, Any]:
    """Return the environment and results that ``python -m benchmarks --save`` saved for a benchmark."""
    run: dict[str, Any] = json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))
    return run


def has_results(name: str) -> bool:
    """Return whether a benchmark has saved results."""
    return (FIGURES / f"{name}.json").exists()


def machine(run: dict[str, Any], threads: int = 0) -> str:
    """Return a description of the machine of a run, and of the number of threads, if it is given."""
    about = run["environment"]
    parts = [
        *([] if about.get("gpu", "none") == "none" else [about["gpu"]]),
        f"{about['cpu']}, {about['cores']} cores",
        *([f"{threads} thread{'s' * (threads > 1)}"] if threads else []),
        f"torch {about['torch']}",
        about["date"],
        *(f"{name}={value}" for name, value in run.get("variables", {}).items()),
        *(["with fewer repeats (`--quick`)"] if run["quick"] else []),
    ]
    return ", ".join(parts)


def command(names: Sequence[str]) -> str:
    """Return the command that measures some benchmarks as they were measured."""
    runs = [run_of(name) for name in names if has_results(name)]
    threads = sorted({number for run in runs for number in run.get("threads", ())})
    options = [*(f"--only {name}" for name in names), *(f"--threads {number}" for number in threads)]
    return f'`make bench BENCH="--save {" ".join(options)}"`'


def _number(value: float, unit: str) -> str:
    return f"{value:.1f}{unit}" if unit else f"{value:.3f}"


def _cells(result: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return the cells of a row: threads, measured value, bound, verdict."""
    bound = "" if result["at_most"] is None else f"{result['at_most']:.4g}{result['unit']}"
    bound = result.get("note") or bound
    if result["measured"] is None:
        return str(result["threads"]), "-", bound, result["skipped"]
    verdict = "" if result["at_most"] is None else "ok" if result["ok"] else "**missed**"
    return str(result["threads"]), _number(result["measured"], result["unit"]), bound, verdict


def _shown(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results to show: all, or of a long list those that missed their bounds, and means."""
    threads = {result["threads"] for result in results}
    if len(results) <= _MAX_ROWS * len(threads):
        return list(results)
    return [result for result in results if not result["ok"] or "mean" in result["what"]]


def _rows(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows; those of one measurement on several numbers of threads share its name."""
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        grouped.setdefault((result["what"], result["against"]), []).append(result)
    for (what, against), same in grouped.items():
        for number, result in enumerate(same):
            names = ("", "") if number else (what, against)
            yield "|".join(["", *(f" {cell} " if cell else " " for cell in (*names, *_cells(result))), ""])


def _verdict(results: Sequence[dict[str, Any]], shown: int) -> str:
    bounded = [result for result in results if result["at_most"] is not None and result["measured"] is not None]
    missed = sum(not result["ok"] for result in bounded)
    verdict = f"{len(bounded) - missed} of {len(bounded)} are within their bounds, {missed} missed."
    if shown == len(results):
        return verdict
    return f"{verdict} Of {len(results)} rows, only means and those that missed are shown."


def _intro(names: Sequence[str], threads: int = 0) -> str:
    """Return the machines of some benchmarks, the command, and the benchmarks without results.

    Args:
        names: the benchmarks.
        threads: the number of threads of all shown figures; 0 if it is shown with each.
    """
    missing = [name for name in names if not has_results(name)]
    machines: dict[str, list[str]] = {}
    for name in names:
        if name not in missing:
            machines.setdefault(machine(run_of(name), threads), []).append(name)
    lines = [
        where if len(machines) == 1 else f"{', '.join(f'`{name}`' for name in of)}: {where}"
        for where, of in machines.items()
    ]
    if missing:
        lines.append(f"Not measured yet: {', '.join(f'`{name}`' for name in missing)}")
    return "\n\n".join(f"{line}." for line in [*lines, f"Measured by {command(names)}"])


def _results(names: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    for name in names:
        if has_results(name):
            yield run_of(name)["results"]


def table(names: Sequence[str]) -> str:
    """Return a Markdown table of some benchmarks, after what `_intro` returns."""
    results = [each for run in _results(names) for each in run]
    shown = [each for run in _results(names) for each in _shown(run)]
    intro = _intro(names)
    if not results:
        return f"{intro}\n"
    header = ["| what | against | threads | measured | at most | |", "| --- | --- | --: | --: | --: | --- |"]
    rows = [*header, *_rows(shown), ""] if shown else []
    return "\n".join([intro, "", *rows, _verdict(results, len(shown)), ""])


def times(names: Sequence[str]) -> str:
    """Return a Markdown table for the most threads: the times of all sides relative to float32's."""
    parts = [_intro(names)]
    for name, results in zip((each for each in names if has_results(each)), _results(names), strict=True):
        threads = max(result["threads"] for result in results)
        title = f"`{name}`, {threads} thread{'s' if threads > 1 else ''}: time relative to float32's:"
        parts += [title, _times([each for each in results if each["threads"] == threads])]
    return "\n\n".join(parts) + "\n"


def _times(results: Sequence[dict[str, Any]]) -> str:
    """Return the table of one number of threads."""
    cases: dict[str, dict[str, str]] = {}
    for result in results:
        if result["against"] != "float32":
            continue
        side = result["sides"][0]
        if side == "float32":
            continue
        cells = cases.setdefault(result["what"].removesuffix(f", {side}"), {})
        cells[side] = "-" if result["measured"] is None else f"{result['measured']:.2f}"
        if result["measured"] is not None:
            milliseconds = 1000 * result["times"][1]
            cells["float32"] = f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"
    columns = list(dict.fromkeys(["float32", *(side for cells in cases.values() for side in cells)]))
    lines = [["", *columns], ["---", *("--:" for _ in columns)]]
    lines += [[case, *(cells.get(column, "") for column in columns)] for case, cells in cases.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sizes(names: Sequence[str]) -> str:
    """Return a Markdown table of the figures that have a unit: a row for each way, and a column for each measure."""
    rows: dict[str, dict[str, str]] = {}
    found = [each for run in _results(names) for each in run if each["unit"] and each["measured"] is not None]
    numbers = {each["threads"] for each in found}
    for result in found:
        way, _, measure = result["what"].rpartition(", ")
        rows.setdefault(way, {})[measure] = f"{result['measured']:,.1f}{result['unit']}"
    columns = list(dict.fromkeys(measure for cells in rows.values() for measure in cells))
    lines = [["", *columns], ["---", *("--:" for _ in columns)]] if rows else []
    lines += [[way, *(cells.get(column, "") for column in columns)] for way, cells in rows.items()]
    intro = _intro(names, *(numbers if len(numbers) == 1 else ()))
    return "\n".join([intro, "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def qualities(names: Sequence[str]) -> str:
    """Return a Markdown table of scores: a row for each format, by bits, and a column for each model and measure."""
    columns: dict[str, dict[str, float]] = {}
    bits: dict[str, float] = {}
    for scores in (each for name in names if has_results(name) for each in run_of(name)["accuracy"]):
        if scores["metric"] == _BITS:
            bits = {**scores["by"], **bits}
        else:
            columns[f"{scores['metric']}, {scores['what']}"] = scores["by"]
    lines = [["format", "bits", *columns], ["---", *("--:" for _ in range(len(columns) + 1))]]
    for name in sorted(bits, key=lambda name: -bits[name]):
        found = (f"{by[name]:.4g}" if name in by else "" for by in columns.values())
        lines.append([name, f"{bits[name]:.2f}", *found])
    return "\n".join([_intro(names), "", *(f"| {' | '.join(line)} |" for line in lines), ""])


_BITS = "bits for each weight"
_MAKE = {"figures": table, "qualities": qualities, "sizes": sizes, "times": times}


def updated(page: str) -> str:
    """Return the page with current tables."""
    return _BETWEEN.sub(
        lambda found: f"{found['kind']} of {found['names']} -->\n{_MAKE[found['kind']](found['names'].split())}", page
    )
