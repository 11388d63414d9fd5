"""Write the tables of docs/benchmarks.md from docs/figures/bench."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "benchmarks.md"
FIGURES = DOCS / "figures" / "bench"
_BETWEEN = re.compile(r"(?<=<!-- figures of )(?P<names>[\w -]+)(?P<start> -->\n).*?(?=<!-- end -->)", re.DOTALL)
_MAX_ROWS = 60
"""Longer tables show only the rows that missed their bounds, and means."""


def run_of(name: str) -> dict[str, Any]:
    """Return the environment and results that ``python -m benchmarks --save`` saved for a benchmark."""
    run: dict[str, Any] = json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))
    return run


def has_results(name: str) -> bool:
    """Return whether a benchmark has saved results."""
    return (FIGURES / f"{name}.json").exists()


def machine(run: dict[str, Any]) -> str:
    """Return a description of the machine of a run."""
    about, quick = run["environment"], ", with fewer repeats (`--quick`)" if run["quick"] else ""
    return f"{about['cpu']}, {about['cores']} cores, Python {about['python']}, torch {about['torch']}{quick}"


def _number(value: float, unit: str) -> str:
    return f"{value:.1f}{unit}" if unit else f"{value:.3f}"


def _cells(result: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return the cells of a row: threads, measured value, bound, verdict."""
    bound = "" if result["at_most"] is None else f"{result['at_most']:.4g}{result['unit']}"
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
    return f"{verdict} Of the {len(results)} rows those that missed are shown, and means."


def table(names: Sequence[str]) -> str:
    """Return a Markdown table of some benchmarks, after their machines and the benchmarks without results."""
    missing = [name for name in names if not has_results(name)]
    machines: dict[str, list[str]] = {}
    results: list[dict[str, Any]] = []
    shown: list[dict[str, Any]] = []
    for name in names:
        if name in missing:
            continue
        run = run_of(name)
        machines.setdefault(machine(run), []).append(name)
        results += run["results"]
        shown += _shown(run["results"])
    lines = [
        where if len(machines) == 1 else f"{', '.join(f'`{name}`' for name in of)}: {where}"
        for where, of in machines.items()
    ]
    if missing:
        lines.append(f"Not measured yet: {', '.join(f'`{name}`' for name in missing)}")
    intro = "\n\n".join(f"{line}." for line in lines)
    if not shown:
        return f"{intro}\n"
    return "\n".join(
        [
            intro,
            "",
            "| what | against | threads | measured | at most | |",
            "| --- | --- | --: | --: | --: | --- |",
            *_rows(shown),
            "",
            _verdict(results, len(shown)),
            "",
        ]
    )


def updated(page: str) -> str:
    """Return the page with current tables."""
    return _BETWEEN.sub(lambda found: found["names"] + found["start"] + table(found["names"].split()), page)


def main() -> None:
    """Write the page if its tables have changed."""
    page = PAGE.read_text(encoding="utf-8")
    if updated(page) != page:
        PAGE.write_text(updated(page), encoding="utf-8")
