"""Make the tables of docs/benchmark-tables.md and docs/families.md from saved figures."""

import pytest


@pytest.fixture
def tables(module):
    return module("tables")


def result(what, measured, at_most=1.0, *, threads=1, unit="", skipped=""):
    ok = measured is None or at_most is None or measured <= at_most
    figures = {"measured": measured, "at_most": at_most, "unit": unit, "ok": ok}
    return {"what": what, "against": "torch", "skipped": skipped, "threads": threads, **figures}


def rows(text):
    return [line for line in text.splitlines() if line.startswith("|")][2:]


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
    assert "101 of 102 are within their bounds, 1 missed. Of 102 rows" in tables.table(["some"])


def test_machine_is_named_once_or_for_each_benchmark_with_the_variables_of_the_process(tables, save):
    save("one", result("a", 0.9))
    save("two", result("b", 0.9))
    save("three", result("c", 0.9), cpu="another", quick=True, variables={"ATEN_CPU_CAPABILITY": "avx2"})
    command = 'Measured by `make bench BENCH="--save --only one --only two{}"`.'
    machine = "4 cores, torch 2.13, 2026-01-31"
    assert tables.table(["one", "two"]).startswith(f"a CPU, {machine}.\n\n{command.format('')}\n\n|")
    assert tables.table(["one", "two", "three"]).startswith(
        f"`one`, `two`: a CPU, {machine}.\n\n"
        f"`three`: another, {machine}, ATEN_CPU_CAPABILITY=avx2, with fewer repeats (`--quick`).\n\n"
        f"{command.format(' --only three')}\n\n|"
    )


def test_the_command_has_the_numbers_of_threads_that_were_asked_for(tables, save):
    save("one", result("a", 0.9))
    assert tables.command(["one", "two"]) == '`make bench BENCH="--save --only one --only two"`'
    save("one", result("a", 0.9), threads=[2])
    assert tables.command(["one"]) == '`make bench BENCH="--save --only one --threads 2"`'


def test_benchmarks_without_results_are_named(tables, save):
    save("one", result("a", 0.9))
    assert "\n\nNot measured yet: `two`.\n\n" in tables.table(["one", "two"])
    for kind in (tables.table, tables.times):
        assert kind(["two", "three"]) == (
            'Not measured yet: `two`, `three`.\n\nMeasured by `make bench BENCH="--save --only two --only three"`.\n'
        )


def test_bounds_that_hold_only_somewhere_say_so(tables, save):
    note = {"note": "0.7 where b takes at least 1 of c's time"}
    save("one", result("a", 0.9, 0.7) | note, result("b", 0.9, None) | note)
    assert rows(tables.table(["one"])) == [
        "| a | torch | 1 | 0.900 | 0.7 where b takes at least 1 of c's time | **missed** |",
        "| b | torch | 1 | 0.900 | 0.7 where b takes at least 1 of c's time | |",
    ]


def test_sizes_have_a_row_for_each_way_and_a_column_for_each_measure(tables, save):
    sizes = [("a, groups of 64, load", 1.25, " s"), ("a, groups of 64, memory", 1234.0, " MB"), ("b, load", 2.0, " s")]
    save("one", result("a", 0.9), *(result(what, size, None) | {"unit": unit} for what, size, unit in sizes))
    page = tables.updated("<!-- sizes of one -->\n<!-- end -->")
    assert "\na CPU, 4 cores, 1 thread, torch 2.13, 2026-01-31.\n" in page
    assert (
        "|  | load | memory |\n| --- | --: | --: |\n| a, groups of 64 | 1.2 s | 1,234.0 MB |\n| b | 2.0 s |  |" in page
    )


def test_times_stand_side_by_side_for_the_most_threads(tables, save):
    def time(what, side, measured, threads, skipped=""):
        sides = {"against": "float32", "sides": [side, "float32"], "times": [measured, 0.25]}
        return result(f"{what}, {side}", measured, None, threads=threads, skipped=skipped) | sides

    save(
        "one",
        result("a, copy", 0.5),
        *(time("a", "copy", 0.5, threads) for threads in (1, 2, 4)),
        *(time("b, small", "copy", None, threads, "copy is left out: it is slow") for threads in (1, 2, 4)),
        time("a", "int8", 0.25, 4),
    )
    assert tables.times(["one"]).partition("`one`, ")[2] == (
        "4 threads: time relative to float32's:\n\n"
        "|  | float32 | copy | int8 |\n| --- | --: | --: | --: |\n"
        "| a | 250 ms | 0.50 | 0.25 |\n| b, small |  | - |  |\n"
    )


def test_formats_stand_by_their_bits(tables, save):
    by = {"bits for each weight": {"a": 4.0, "b": 8.25}, "error": {"b": 0.125, "a": 0.5}, "other": {"a": 2.0}}
    save("some", accuracy=[{"what": "model", "metric": metric, "by": values} for metric, values in by.items()])
    text = tables.qualities(["some"])
    assert "| format | bits | error, model | other, model |" in text
    assert rows(text) == ["| b | 8.25 | 0.125 |  |", "| a | 4.00 | 0.5 | 2 |"]


EMPTY = "<!-- table of families -->\n<!-- end -->"


@pytest.fixture
def families(module):
    return module("families")


def score(what, metric, *, note="", skipped="", **by):
    return {"what": what, "metric": metric, "kept": "", "by": by, "skipped": skipped, "note": note}


def times(what, copy, int8, int4):
    sides = {"a bfloat16 copy": copy, "int8": int8, "int4": int4}
    return [
        {"what": f"{what}, {side}", "against": "float32", "measured": value, "times": value and (value, 0.04)}
        for side, value in sides.items()
    ]


def test_a_family_has_shares_errors_and_times(families, save):
    accuracy = [
        score("A, b, 128 tokens", "share of FLOPs", int8=0.984, int4=0.0, note="attention 2%"),
        score("A, b, 128 tokens", "error relative to bfloat16's", int8=4.31, int4=1.0),
    ]
    results = [*times("A, b, 1 token", 0.5, 0.4, 0.6), *times("A, b, 128 tokens", None, 1.2, None)]
    save("families", *results, quick=True, accuracy=accuracy)
    text = families.updated(EMPTY)
    assert "with fewer repeats (`--quick`)" in text
    shown = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert shown[1::2] == [
        "| A, b | 98% | 0% | 4.3 | - | attention 2% |",
        "| A, b, 1 token | 40 ms | 0.50 | 0.40 | **0.60** |",
    ]
    assert shown[-1] == "| A, b, 128 tokens | 40 ms | - | **1.20** | - |"


@pytest.mark.usefixtures("save")
def test_without_figures_the_page_says_how_to_measure(families):
    assert 'Not measured yet: measure it with `make bench BENCH="--save --only families"`' in families.updated(EMPTY)
