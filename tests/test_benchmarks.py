"""The benchmarks: their numbers of threads, the computation of their figures, and the names of processors in them."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parent.parent
EACH = {
    "compiled",
    "fastest",
    "few-rows",
    "int4",
    "llama-compiled",
    "llama-cpp",
    "low-bit",
    "numerics",
    "ops",
    "rates",
    "scenarios",
}


@pytest.fixture
def catalog(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return pytest.importorskip("benchmarks.catalog")


@pytest.fixture
def timing(catalog):
    return pytest.importorskip("benchmarks.timing")


def test_benchmarks_that_depend_on_threads_run_on_1_2_4_and_all_but_no_more_than_there_are(catalog, monkeypatch):
    assert {name for name, entry in catalog.BENCHMARKS.items() if entry.threads is catalog.each} == EACH
    for processors, threads in ((1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (16, (1, 2, 4, 16))):
        monkeypatch.setattr(catalog, "all_of_them", lambda processors=processors: (processors,))
        assert catalog.each() == threads
        assert catalog.one_and_all() == tuple(sorted({1, processors}))


def test_a_plan_ends_after_its_rounds_or_its_seconds_but_not_before_three(timing):
    assert list(timing.Plan([], rounds=5).turns(quick=False)) == [0, 1, 2, 3, 4]
    assert list(timing.Plan([], rounds=20).turns(quick=True)) == [0, 1, 2, 3]
    assert list(timing.Plan([], rounds=5, most_seconds=0).turns(quick=False)) == [0, 1, 2]


def test_a_ratio_is_the_median_over_the_rounds_or_the_ratio_of_the_minima(timing):
    plan = timing.Plan([timing.Ratio("a", "b", "ours", "theirs", 0.5)], mean="all", mean_at_most=2.0)
    taken = [{"ours": 1.0, "theirs": 2.0}, {"ours": 3.0, "theirs": 4.0}, {"ours": 9.0, "theirs": 3.0}]
    median, least = plan.results(taken), plan.results(taken, least=True)
    assert [(each.what, each.measured, each.ok) for each in median] == [("a", 0.75, False), ("all", 0.75, True)]
    assert [(each.measured, each.ok) for each in least] == [(0.5, True), (0.5, True)]


def test_a_slow_side_is_timed_once_and_a_figure_without_a_bound_is_ok(timing):
    plan = timing.Plan([timing.Ratio("a", "b", "a", "b", None)], once={"b": 8.0})
    (result,) = plan.results([{"a": 1.0}, {"a": 4.0}, {"a": 2.0}])
    assert (result.measured, result.ok) == (0.25, True)
    assert timing.Result("a", "float32", 7.0, None).ok


def test_the_fastest_of_several_sides_counts(timing):
    plan = timing.Plan([timing.Ratio("a", "the fastest of b and c", "a", ("b", "c"), 1.0)])
    taken = [{"a": 1.0, "b": 4.0, "c": 2.0}, {"a": 3.0, "b": 1.0, "c": 2.0}, {"a": 6.0, "b": 4.0, "c": 2.0}]
    (median,), (least,) = plan.results(taken), plan.results(taken, least=True)
    assert (median.measured, median.times, median.sides) == (1.5, (3.0, 2.0), ("a", "c"))
    assert (least.measured, least.times, least.sides) == (1.0, (1.0, 1.0), ("a", "b"))


def test_sides_with_a_base_are_compared_relative_to_it_in_their_own_process(timing):
    results_of = pytest.importorskip("benchmarks.apart").results_of
    ratios = [timing.Ratio("a", "b", "ours", "theirs", None), timing.Ratio("a", "b", "again", "base", None)]
    bases = {"base": "base", "ours": "base", "theirs": "again"}
    plan = timing.Plan(ratios, once={"theirs": 6.0}, bases=bases)
    slow_process = [{"base": 4.0, "ours": 2.0, "again": 3.0}, {"base": 5.0, "ours": 3.0, "again": 3.5}]
    fast_process = [{"base": 2.0, "ours": 1.2, "again": 3.0}]
    found = [each.measured for each in results_of(plan, [slow_process, fast_process], least=True)]
    assert found == pytest.approx([(2.0 / 4.0) / (6.0 / 3.0), 3.0 / 2.0])
    assert results_of(timing.Plan(ratios[:1]), [[{"ours": 1.0, "theirs": 2.0}]])[0].measured == 0.5


def test_the_spread_reaches_to_the_time_of_nine_turns_in_ten(timing):
    plan = timing.Plan([timing.Ratio("a", "b", "ours", "theirs", None)])
    taken = [{"ours": 1.0 + number / 10, "theirs": 2.0 + number} for number in range(11)]
    assert plan.results(taken, least=True)[0].spread == pytest.approx((0.5, 0.95))
    assert plan.results(taken)[0].spread == pytest.approx((1.9 / 11, 1.1 / 3))
    assert plan.results([{"ours": 1.0, "theirs": 4.0}], least=True)[0].spread == (0.25, 0.25)


def test_a_bound_may_hold_only_where_a_side_is_slow(timing):
    plan = timing.Plan([timing.Ratio("a", "b", "a", "b", 0.7, ("b", "c", 1.0))])
    for seconds, at_most in ((1.0, 0.7), (0.9, None)):
        (result,) = plan.results([{"a": 1.0, "b": seconds, "c": 1.0}])
        assert (result.at_most, result.note) == (at_most, "0.7 where b takes at least 1 of c's time")


def test_a_side_that_is_left_out_is_named_and_counts_as_slow(timing):
    to_b = timing.Ratio("a", "b", "a", "b", 0.7, ("b", "c", 1.0))
    to_fastest = timing.Ratio("a", "the fastest of b and c", "a", ("b", "c"), 1.0)
    plan = timing.Plan([to_b, to_fastest], left_out={"b": "it is slow"})
    to_b, to_fastest = plan.results([{"a": 1.0, "c": 2.0}])
    assert (to_b.measured, to_b.at_most, to_b.skipped) == (None, 0.7, "b is left out: it is slow")
    assert (to_fastest.measured, to_fastest.sides) == (0.5, ("a", "c"))


def test_slow_sides_are_found_by_the_time_of_the_fastest_before_them(timing, monkeypatch):
    seconds = {"fast": 1.0, "slow": 5.0, "never": 5.0, "faster": 0.5}
    monkeypatch.setattr(timing.Side, "time", lambda side, calls: seconds[side.statement])
    sides = {name: timing.Side(name, may_be_slow=name in {"slow", "faster"}) for name in seconds}
    race, calls = timing.Race([], sides=sides, seconds=2.0).warmed_up(sides)
    assert (race.once, race.left_out, calls) == ({"slow": 5.0}, {}, {"fast": 2, "never": 1, "faster": 4})


def test_a_side_that_takes_too_long_is_interrupted_and_left_out(timing, monkeypatch):
    limits = []

    @contextmanager
    def limited(seconds):
        limits.append(seconds)
        if len(limits) == 2:
            raise TimeoutError
        yield

    monkeypatch.setattr(timing, "time_limit", limited)
    monkeypatch.setattr(timing.Side, "time", lambda side, calls: 0.5)
    sides = {name: timing.Side("", may_be_slow=True) for name in ("a", "b")}
    race, calls = timing.Race([], sides=sides, seconds=1.0).warmed_up(sides)
    assert (race.left_out, calls) == ({"b": "over 5 times the fastest side's time"}, {"a": 2})
    assert limits == [float("inf"), 2.5]


def test_a_side_that_raises_is_left_out(timing):
    def run():
        raise RuntimeError("could not create a primitive. Run workload with ONEDNN_VERBOSE.")

    sides = {"a": timing.Side("pass"), "b": timing.Side("run()", {"run": run})}
    race, calls = timing.Race([], sides=sides).warmed_up(sides)
    assert (race.left_out, calls.keys()) == ({"b": "torch raises 'could not create a primitive'"}, {"a"})


def test_a_long_side_is_called_once_before_it_is_timed_if_the_kernels_have_changed(timing, monkeypatch):
    monkeypatch.setattr(timing, "_library", "polycast")
    monkeypatch.setattr(timing.polycast, "uninstall", lambda: None)
    calls = []
    side = timing.LongSide("calls.append(1)", {"calls": calls}, kernels="torch")
    counts = []
    for number in (3, 1, 2):
        calls.clear()
        side.time(number)
        counts.append(len(calls))
    assert counts == [4, 1, 2]


def test_time_limit_interrupts_the_block_and_restores_the_handler(timing):
    def run():
        while True:  # signal.pause() would wait forever if the signal came just before
            pass

    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError), timing.time_limit(0.001):
        run()
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_benchmark_may_set_variables_of_its_process(catalog, monkeypatch):
    environments = []

    def run(command, *, env, **_):
        environments.append(env)
        return subprocess.CompletedProcess(command, 0, json.dumps({"results": [], "accuracy": []}))

    monkeypatch.setattr(catalog.subprocess, "run", run)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    for name in ("fastest", "fastest-avx2"):
        catalog.measure(name, 2, quick=True)
    variables = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS")
    assert [tuple(map(each.get, variables)) for each in environments] == [(None, None, "2"), ("avx2", "AVX2", "2")]


@pytest.fixture
def fastest(catalog):
    return pytest.importorskip("benchmarks.fastest")


def test_fastest_runs_the_scenarios_and_common_models(catalog, fastest):
    assert len({case.what for case in fastest.SCENARIOS}) == 20
    kinds = {case.what: type(case) for case in fastest.MODELS}
    inference = ["GPT-2 small, 128 tokens", "GPT-2 small, 1 token", "LLaMA 1.1 B, 1 token", "BERT base, 4 x 128 tokens"]
    inference += ["ViT base, 2 images", "ResNet-18, 2 images", "ResNet-50, 2 images"]
    steps = ["GPT-2 of 6 layers, {} of 4 x 128 tokens", "BERT of 4 layers, {} of 4 x 128 tokens"]
    steps = [each.format("training step") for each in (*steps, "ResNet-18, {} of 2 images")]
    assert {kinds[name] for name in inference} == {fastest.Inference}
    assert {kinds[name] for name in steps} == {fastest.Training}
    assert catalog.BENCHMARKS["fastest"].threads is catalog.each
    assert catalog.BENCHMARKS["fastest-avx2"].make().processes == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_has_no_figures_without_one(catalog):
    pytest.importorskip("benchmarks.gpu")
    results = catalog.BENCHMARKS["gpu"].make().run(quick=True)
    assert len(results) >= 14
    assert all(each.measured is None and "CUDA" in each.skipped for each in results)


def test_fastest_runs_each_case_in_every_way(fastest):
    ways = fastest.ways()
    trained = {"float32", "torch.autocast", "a plain region", "fastest"}
    others = {"a bfloat16 copy", "WeightCache", "fastest, WeightCache", "int8"}
    assert trained | others <= ways.keys()
    assert {name for name, way in ways.items() if way.trains} >= trained
    assert {way.kernels for way in ways.values()} == {"torch", "polycast"}
    raced = []

    def sides(all_ways, kind):
        raced.append(all_ways.keys())
        return dict.fromkeys(all_ways)

    for case in (*fastest.SCENARIOS, *fastest.MODELS):
        race = fastest._race(SimpleNamespace(what=case.what, sides=sides))
        bounds = {(each.ours, each.theirs): (each.at_most, each.where) for each in race.ratios}
        for ours in ("fastest", "fastest, WeightCache"):
            assert bounds[ours, ("float32", "torch.autocast", "a plain region")] == (1.08, None)
    assert all(each == ways.keys() for each in raced)


def test_fastest_has_the_bounds_of_its_models(fastest):
    found = {(each.ours, each.theirs, what): each.at_most for what, all in fastest.BOUNDS.items() for each in all}
    one_token, step = "LLaMA 1.1 B, 1 token", "GPT-2 of 6 layers, training step of 4 x 128 tokens"
    expected = {
        ("fastest", "torch.autocast", "GPT-2 small, 128 tokens"): 0.7,
        ("fastest", "torch.autocast", "BERT base, 4 x 128 tokens"): 0.7,
        ("fastest", "torch.autocast", "ViT base, 2 images"): 0.7,
        ("fastest", "torch.autocast", step): 0.75,
        ("fastest, WeightCache", "a bfloat16 copy", "GPT-2 small, 1 token"): 0.75,
        ("fastest, WeightCache", "a bfloat16 copy", one_token): 0.65,
        ("int8", "a bfloat16 copy", "GPT-2 small, 1 token"): 0.36,
        ("int8", "a bfloat16 copy", one_token): 0.33,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert fastest.BOUNDS.keys() <= {case.what for case in fastest.MODELS}


def test_fastest_bounds_the_peak_memory_of_training_by_torchs(fastest, monkeypatch):
    peaks = {"fastest": "103", "torch.autocast": "100"}

    def run(command, **_):
        return subprocess.CompletedProcess(command, 0, peaks[command[-1]])

    monkeypatch.setattr(fastest.subprocess, "run", run)
    (result,) = fastest.Memory().run(quick=False)
    assert (result.measured, result.against, result.ok) == (1.03, "torch.autocast", False)


INT8_IS_SLOW = "int8 does not compute it: int8 takes 5 of bfloat16's"


@pytest.mark.parametrize(("ratio", "measured", "reason"), [(0.5, 3.0, ""), (5.0, None, INT8_IS_SLOW)])
def test_low_bit_call_is_measured_only_where_int8_computes_it(
    ratio, measured, reason, profile_of, catalog, monkeypatch, native, tmp_path
):
    low_bit = pytest.importorskip("benchmarks.low_bit")
    if low_bit._missing()[0]:
        pytest.skip(low_bit._missing()[0])
    profile_of(overhead=1e-15, cast=1e-15, bfloat16=1.0, int8=ratio).save(tmp_path / "machine.json")
    monkeypatch.setenv("POLYCAST_PROFILE", str(tmp_path / "machine.json"))
    monkeypatch.setattr(low_bit.Side, "time", lambda side, calls: 3e-6)
    (result,) = low_bit.Call().run(quick=True)
    assert (result.measured, result.at_most) == (pytest.approx(measured), 4.0)
    assert result.skipped.startswith(reason)
    assert bool(result.skipped) == bool(reason)


def test_families_are_at_least_thirty_with_names_of_their_own(catalog):
    models = pytest.importorskip("benchmarks.family_models")
    names = [family.name for family in models.FAMILIES]
    assert len(set(names)) == len(names) >= 30


def test_a_family_has_shares_errors_and_ratios_of_every_side(catalog):
    families, models = pytest.importorskip("benchmarks.families"), pytest.importorskip("benchmarks.family_models")

    class Model(torch.nn.Linear):
        def forward(self, x):
            return (super().forward(x),)

    family = models.Family("one", lambda: Model(256, 256), lambda rows: {"x": torch.randn(rows, 256)}, (1, 2), "row")
    figures = families.Families((family,)).run(quick=True)
    names = [(each.what, getattr(each, "metric", None) or each.against) for each in figures]
    sides = [("a bfloat16 copy", "float32"), ("int8", "float32"), ("int4", "float32")]
    sides += [("int8", "a bfloat16 copy"), ("int4", "a bfloat16 copy")]
    assert names[:7] == [
        *(("one, 2 rows", metric) for metric in (families.SHARE, families.ERROR)),
        *((f"one, 1 row, {side}", against) for side, against in sides),
    ]
    assert not figures[0].by or (figures[0].by == {"int8": 1.0, "int4": 1.0} and figures[1].by["int4"] > 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["depth", "small"], ids=["in one process", "apart"])
def test_a_benchmark_runs_in_processes_with_its_number_of_threads(name):
    command = [sys.executable, "-m", "benchmarks.catalog", name, "quick"]
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "MKL_DYNAMIC": "FALSE", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    results = json.loads(done.stdout)["results"]
    assert {each["threads"] for each in results} == {3}
    assert all(each["measured"] > 0 for each in results)


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: EPYC\n", "EPYC, Zen 4 (Genoa)"),
        ("vendor_id : GenuineIntel\ncpu family : 6\nmodel : 143\nmodel name : Xeon", "Xeon, Sapphire Rapids"),
        ("vendor_id : HygonGenuine\ncpu family : 24\nmodel : 1\nmodel name : C86", "C86, family 24, model 1"),
        ("BogoMIPS : 50\nCPU implementer : 0x41\nCPU part : 0xd40\n\nCPU part : 0xd0c", "Arm Neoverse V1"),
        ("CPU implementer : 0x99\nCPU part : 0x001", "Arm, implementer 0x99, part 0x001"),
        ("isa : rv64", ""),
    ],
    ids=["amd", "intel", "unknown", "arm", "unknown-arm", "none"],
)
def test_a_processor_is_named_with_its_generation(cpuinfo, name, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
    assert pytest.importorskip("benchmarks.processor").named(cpuinfo) == name
