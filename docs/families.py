"""Write the tables of model families in docs/families.md from docs/figures/bench."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from . import tables

PAGES = (tables.DOCS / "families.md",)
BENCHMARK = "families"
_BETWEEN = re.compile(r"(?<=<!-- table of families -->\n).*?(?=<!-- end -->)", re.DOTALL)
_SIDES = ("a bfloat16 copy", "int8", "int4")
_SHARE, _ERROR = "share of FLOPs", "error relative to bfloat16's"
_SLOWER = 1.05
"""A recipe that takes so many times the time of the faster of float32 and the copy is marked."""


def updated(page: str) -> str:
    """Return the page with current tables."""
    if not tables.has_results(BENCHMARK):
        return _BETWEEN.sub(lambda _: f"Not measured yet: measure it with {tables.command([BENCHMARK])}.\n", page)
    run = tables.run_of(BENCHMARK)
    intro = f"{tables.machine(run)}. Measured by {tables.command([BENCHMARK])}."
    return _BETWEEN.sub(lambda _: "\n".join([intro, "", *_coverage(run), "", *_times(run["results"]), ""]), page)


def _coverage(run: dict[str, Any]) -> Iterable[str]:
    """Yield the table of shares and errors."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for scores in run["accuracy"]:
        rows.setdefault(_family(scores["what"]), {})[scores["metric"]] = scores
    yield "| family | share, int8 | int4 | error, int8 | int4 | not computed in int8 |"
    yield "| --- | --: | --: | --: | --: | --- |"
    for family, by_metric in rows.items():
        shares, errors = by_metric[_SHARE], by_metric[_ERROR]
        cells = [_percent(shares["by"].get(side)) for side in _SIDES[1:]]
        cells += [_text(errors["by"].get(side) if shares["by"].get(side) else None, 1) for side in _SIDES[1:]]
        yield _row([family, *cells, shares["skipped"] or shares["note"]])


def _times(results: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Yield the table of times."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for result in results:
        what, _, side = result["what"].rpartition(", ")
        if result["against"] == "float32":
            rows.setdefault(what, {})[side] = result
    yield "| time, where float32 takes 1 | float32 | a bfloat16 copy | int8 | int4 |"
    yield "| --- | --: | --: | --: | --: |"
    for what, sides in rows.items():
        measured = {side: sides[side]["measured"] for side in _SIDES}
        seconds = next((each["times"][1] for each in sides.values() if each["times"]), None)
        plain = "-" if seconds is None else f"{1000 * seconds:.3g} ms"
        fastest = min(1.0, measured[_SIDES[0]] or 1.0)
        cells = [_time(measured[side], fastest if side in _SIDES[1:] else None) for side in _SIDES]
        yield _row([what, plain, *cells])


def _time(measured: float | None, fastest: float | None) -> str:
    text = _text(measured, 2)
    is_slow = measured is not None and fastest is not None and measured > _SLOWER * fastest
    return f"**{text}**" if is_slow else text


def _family(what: str) -> str:
    """Return the name of a family, given that with a size."""
    return what.rpartition(", ")[0]


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{share:.0%}" if share == 0 or share >= 0.005 else "< 1%"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
