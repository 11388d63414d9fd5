"""The tables of docs/benchmarks.md are up to date, and what they show."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def tables(monkeypatch):
    """Return docs.tables."""
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("docs.tables")


@pytest.fixture
def save(tables, tmp_path, monkeypatch):
    """Return a function that saves the results of a benchmark."""
    monkeypatch.setattr(tables, "FIGURES", tmp_path)

    def save(name, *results, cpu="a CPU", quick=False):
        about = {"cpu": cpu, "cores": 4, "python": "3.11", "torch": "2.13"}
        run = {"quick": quick, "environment": about, "results": list(results)}
        (tmp_path / f"{name}.json").write_text(json.dumps(run), encoding="utf-8")

    return save


def result(what, measured, at_most=1.0, *, threads=1, unit="", skipped=""):
    ok = measured is None or at_most is None or measured <= at_most
    return {
        "what": what,
        "against": "torch",
        "measured": measured,
        "at_most": at_most,
        "unit": unit,
        "skipped": skipped,
        "threads": threads,
        "ok": ok,
    }


def rows(text):
    return [line for line in text.splitlines() if line.startswith("|")][2:]


def test_page_has_the_current_tables(tables):
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.updated(page) == page
    assert "| what | against | threads | measured | at most | |" in page


def test_rows_of_one_measurement_share_a_name(tables, save):
    save("some", result("a", 0.9), result("b", 0.5), result("a", 1.1, threads=4), result("b", 1.0, threads=4))
    assert rows(tables.table(["some"])) == [
        "| a | torch | 1 | 0.900 | 1 | ok |",
        "| | | 4 | 1.100 | 1 | **missed** |",
        "| b | torch | 1 | 0.500 | 1 | ok |",
        "| | | 4 | 1.000 | 1 | ok |",
    ]
    assert tables.table(["some"]).endswith("\n3 of 4 are within their bounds, 1 missed.\n")


def test_unbounded_figure_has_no_verdict_and_skipped_figure_has_a_reason(tables, save):
    save("some", result("a", 1.5, None), result("b", None, 0.5, skipped="no VNNI"), result("c", 2.0, 15, unit=" ms"))
    assert rows(tables.table(["some"])) == [
        "| a | torch | 1 | 1.500 | | |",
        "| b | torch | 1 | - | 0.5 | no VNNI |",
        "| c | torch | 1 | 2.0 ms | 15 ms | ok |",
    ]
    assert "1 of 1 are within their bounds" in tables.table(["some"])


def test_long_table_shows_missed_rows_and_the_mean(tables, save):
    many = [result(f"op {number}", 0.9) for number in range(100)]
    save("some", *many, result("bad", 1.2), result("the geometric mean of 101 ops", 0.95))
    assert [row.split(" | ")[0] for row in rows(tables.table(["some"]))] == ["| bad", "| the geometric mean of 101 ops"]
    assert "101 of 102 are within their bounds, 1 missed. Of the 102 rows" in tables.table(["some"])


def test_machine_is_named_once_or_for_each_benchmark(tables, save):
    save("one", result("a", 0.9))
    save("two", result("b", 0.9))
    save("three", result("c", 0.9), cpu="another", quick=True)
    assert tables.table(["one", "two"]).startswith("a CPU, 4 cores, Python 3.11, torch 2.13.\n\n|")
    assert tables.table(["one", "two", "three"]).startswith(
        "`one`, `two`: a CPU, 4 cores, Python 3.11, torch 2.13.\n\n"
        "`three`: another, 4 cores, Python 3.11, torch 2.13, with fewer repeats (`--quick`).\n\n|"
    )


def test_benchmarks_without_results_are_named(tables, save):
    save("one", result("a", 0.9))
    assert "\n\nNot measured yet: `two`.\n\n| what |" in tables.table(["one", "two"])
    assert tables.table(["two", "three"]) == "Not measured yet: `two`, `three`.\n"
