"""The benchmarks: their numbers of threads, and the computation of their figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EACH = {"compiled", "gpt2", "linears", "low-bit", "ops", "rates", "scenarios"}


@pytest.fixture
def catalog(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return pytest.importorskip("benchmarks.catalog")


@pytest.fixture
def timing(catalog):
    return pytest.importorskip("benchmarks.timing")


def test_benchmarks_that_depend_on_threads_run_on_1_2_4_and_all(catalog, monkeypatch):
    assert {name for name, entry in catalog.BENCHMARKS.items() if entry.threads is catalog.each} == EACH
    for processors, threads in ((1, (1, 2, 4)), (2, (1, 2, 4)), (4, (1, 2, 4)), (16, (1, 2, 4, 16))):
        monkeypatch.setattr(catalog, "all_of_them", lambda processors=processors: (processors,))
        assert catalog.each() == threads


def test_a_plan_ends_after_its_rounds_or_its_seconds_but_not_before_three(timing):
    assert list(timing.Plan([], rounds=5).turns(quick=False)) == [0, 1, 2, 3, 4]
    assert list(timing.Plan([], rounds=20).turns(quick=True)) == [0, 1, 2, 3]
    assert list(timing.Plan([], rounds=5, most_seconds=0).turns(quick=False)) == [0, 1, 2]


def test_a_ratio_is_the_median_over_the_rounds_or_the_ratio_of_the_minima(timing):
    plan = timing.Plan([timing.Ratio("a", "b", "ours", "theirs", 1.0)], mean="all", mean_at_most=2.0)
    taken = [{"ours": 1.0, "theirs": 2.0}, {"ours": 3.0, "theirs": 4.0}, {"ours": 9.0, "theirs": 3.0}]
    assert [each.measured for each in plan.results(taken)] == [0.75, 0.75]
    assert [each.measured for each in plan.results(taken, least=True)] == [0.5, 0.5]
    assert [each.what for each in plan.results(taken)] == ["a", "all"]


def test_a_figure_without_a_bound_is_ok(timing):
    assert timing.Result("a", "float32", 7.0, None).ok
    assert not timing.Result("a", "torch", 7.0, 1.0).ok


@pytest.mark.slow
@pytest.mark.parametrize("name", ["depth", "linears"], ids=["in one process", "apart"])
def test_a_benchmark_runs_in_processes_with_its_number_of_threads(name):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.catalog", name, "quick"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    results = json.loads(done.stdout)["results"]
    assert {each["threads"] for each in results} == {3}
    assert all(each["measured"] > 0 for each in results)
