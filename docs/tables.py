"""The tables of docs/benchmarks.md: ``python -m docs.tables`` makes them from docs/figures/bench."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "benchmarks.md"
FIGURES = DOCS / "figures" / "bench"
_BETWEEN = re.compile(r"(?<=<!-- figures of )(?P<names>[\w -]+)(?P<start> -->\n).*?(?=<!-- end -->)", re.DOTALL)
_SHOWN_IN_FULL = 60
"""Of a benchmark with more rows on a number of threads, only those that missed their bounds and the mean are shown."""


def run_of(name: str) -> dict[str, Any]:
    """Return what ``python -m benchmarks --save`` kept of a benchmark: its environment and results."""
    run: dict[str, Any] = json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))
    return run


def is_kept(name: str) -> bool:
    """Return whether anything is kept of a benchmark."""
    return (FIGURES / f"{name}.json").exists()


def machine(run: dict[str, Any]) -> str:
    """Return where a run was, in some words."""
    about, quick = run["environment"], ", with fewer repeats (`--quick`)" if run["quick"] else ""
    return f"{about['cpu']}, {about['cores']} cores, Python {about['python']}, torch {about['torch']}{quick}"


def _number(value: float, unit: str) -> str:
    return f"{value:.1f}{unit}" if unit else f"{value:.3f}"


def _cells(result: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return the cells of a result from the number of threads on."""
    bound = "" if result["at_most"] is None else f"{result['at_most']:.4g}{result['unit']}"
    if result["measured"] is None:
        return str(result["threads"]), "-", bound, result["skipped"]
    verdict = "" if result["at_most"] is None else "ok" if result["ok"] else "**missed**"
    return str(result["threads"]), _number(result["measured"], result["unit"]), bound, verdict


def _shown(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results that have a row: all, or of very many those that missed and the mean of all."""
    threads = {result["threads"] for result in results}
    if len(results) <= _SHOWN_IN_FULL * len(threads):
        return list(results)
    return [result for result in results if not result["ok"] or "mean" in result["what"]]


def _rows(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows; what is measured on several numbers of threads stands together, and is named once."""
    together: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        together.setdefault((result["what"], result["against"]), []).append(result)
    for (what, against), same in together.items():
        for number, result in enumerate(same):
            names = ("", "") if number else (what, against)
            yield "|".join(["", *(f" {cell} " if cell else " " for cell in (*names, *_cells(result))), ""])


def _verdict(results: Sequence[dict[str, Any]], shown: int) -> str:
    bounded = [result for result in results if result["at_most"] is not None and result["measured"] is not None]
    missed = sum(not result["ok"] for result in bounded)
    said = f"{len(bounded) - missed} of {len(bounded)} are within their bounds, {missed} missed."
    return (
        said if shown == len(results) else f"{said} Of the {len(results)} rows those that missed are shown, and means."
    )


def table(names: Sequence[str]) -> str:
    """Return the rows of some benchmarks in Markdown, under the machines that they were run on.

    Those of which nothing is kept are named.
    """
    missing = [name for name in names if not is_kept(name)]
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
    said = "\n\n".join(f"{line}." for line in lines)
    if not shown:
        return f"{said}\n"
    return "\n".join(
        [
            said,
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
    """Return the page with its tables as they should be."""
    return _BETWEEN.sub(lambda found: found["names"] + found["start"] + table(found["names"].split()), page)


def main() -> None:
    """Write the page if its tables are others now."""
    page = PAGE.read_text(encoding="utf-8")
    if updated(page) != page:
        PAGE.write_text(updated(page), encoding="utf-8")


if __name__ == "__main__":
    main()
