"""The tables of the benchmarks' page: that they are of the figures that are kept, and how they are made."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def tables(monkeypatch):
    """Return the module that makes them."""
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("docs.tables")


@pytest.fixture
def keep(tables, tmp_path, monkeypatch):
    """Return a function that keeps the results of a benchmark."""
    monkeypatch.setattr(tables, "FIGURES", tmp_path)

    def keep(name, *results, cpu="a CPU", quick=False):
        about = {"cpu": cpu, "cores": 4, "python": "3.11", "torch": "2.13"}
        run = {"quick": quick, "environment": about, "results": list(results)}
        (tmp_path / f"{name}.json").write_text(json.dumps(run), encoding="utf-8")

    return keep


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


def test_the_pages_tables_are_those_of_the_last_run(tables):
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.updated(page) == page
    assert "| what | against | threads | measured | at most | |" in page


def test_a_row_for_each_number_of_threads_and_a_name_for_all(tables, keep):
    keep("some", result("a", 0.9), result("b", 0.5), result("a", 1.1, threads=4), result("b", 1.0, threads=4))
    assert rows(tables.table(["some"])) == [
        "| a | torch | 1 | 0.900 | 1 | ok |",
        "| | | 4 | 1.100 | 1 | **missed** |",
        "| b | torch | 1 | 0.500 | 1 | ok |",
        "| | | 4 | 1.000 | 1 | ok |",
    ]
    assert tables.table(["some"]).endswith("\n3 of 4 are within their bounds, 1 missed.\n")


def test_a_figure_without_a_bound_has_no_verdict_and_one_that_was_skipped_its_reason(tables, keep):
    keep("some", result("a", 1.5, None), result("b", None, 0.5, skipped="no VNNI"), result("c", 2.0, 15, unit=" ms"))
    assert rows(tables.table(["some"])) == [
        "| a | torch | 1 | 1.500 | | |",
        "| b | torch | 1 | - | 0.5 | no VNNI |",
        "| c | torch | 1 | 2.0 ms | 15 ms | ok |",
    ]
    assert "1 of 1 are within their bounds" in tables.table(["some"])


def test_of_very_many_rows_those_that_missed_are_shown_and_the_mean(tables, keep):
    many = [result(f"op {number}", 0.9) for number in range(100)]
    keep("some", *many, result("bad", 1.2), result("the geometric mean of 101 ops", 0.95))
    assert [row.split(" | ")[0] for row in rows(tables.table(["some"]))] == ["| bad", "| the geometric mean of 101 ops"]
    assert "101 of 102 are within their bounds, 1 missed. Of the 102 rows" in tables.table(["some"])


def test_the_machine_is_named_once_or_for_each_benchmark(tables, keep):
    keep("one", result("a", 0.9))
    keep("two", result("b", 0.9))
    keep("three", result("c", 0.9), cpu="another", quick=True)
    assert tables.table(["one", "two"]).startswith("a CPU, 4 cores, Python 3.11, torch 2.13.\n\n|")
    assert tables.table(["one", "two", "three"]).startswith(
        "`one`, `two`: a CPU, 4 cores, Python 3.11, torch 2.13.\n\n"
        "`three`: another, 4 cores, Python 3.11, torch 2.13, with fewer repeats (`--quick`).\n\n|"
    )


def test_what_was_not_measured_is_named(tables, keep):
    keep("one", result("a", 0.9))
    assert "\n\nNot measured yet: `two`.\n\n| what |" in tables.table(["one", "two"])
    assert tables.table(["two", "three"]) == "Not measured yet: `two`, `three`.\n"
