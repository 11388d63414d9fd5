"""The finding about a fast dtype that is slower than float32."""

import re
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import polycast
from polycast.plugin import events
from polycast_plugins.fastest.measurement import Measurement
from polycast_plugins.observe import Matmul, MatmulRows, Observation, counting
from polycast_plugins.observe.facts import Facts, Run

X, WEIGHT = torch.randn(128, 64), torch.randn(64, 64)
OPS = ("linear", "matmul", "bmm")


@pytest.fixture(autouse=True)
def _has_bfloat16(monkeypatch):
    """Run on a processor with instructions for the fast dtypes."""
    monkeypatch.setattr(type(polycast.plugin.get_backend("cpu")), "slow_reason", lambda self, dtype: None)


@pytest.fixture
def profiled(monkeypatch):
    """Return a function that gives cpu a profile, with times relative to float32 by way, or by way and rows."""

    def profiled(**ratios):
        ways = {"float32": 1.0, **{way.replace("_", " "): each for way, each in ratios.items()}}
        measured = tuple(
            Measurement(op, rows, way, 1e-6 * rows * (ratio[rows] if isinstance(ratio, dict) else ratio), 4096)
            for op in OPS
            for way, ratio in ways.items()
            for rows in (1, 128)
            if op != "bmm" or way in ("float32", "bfloat16")
        )
        profile = polycast.DeviceProfile("cpu", "a cpu", 4, {}, {}, measured, 1e10)
        monkeypatch.setattr(counting, "_profile_of", lambda device_type: profile)

    return profiled


FASTEST = '`recipe="fastest"` (about {} of float32\'s time)'


def linear():
    return F.linear(X, WEIGHT)


def test_dtype_that_the_profile_says_is_slower_is_found(engine, profiled, findings, in_region):
    profiled(bfloat16={1: 1.1, 128: 1.6}, int8=0.4)
    (found,) = findings("slow_dtype", in_region(linear, 2))
    assert found.what == "bfloat16 matmuls of 128 rows take 1.6 of float32's time on cpu, by its profile."
    int8 = '`recipe="int8"` (about 0.4 of float32\'s time, for inference)'
    assert found.remedy == f"{FASTEST.format(1)} or {int8} avoid that."
    assert (found.where, found.ops, found.count) == ("cpu", ("aten::linear",), 2)
    profiled(bfloat16={1: 1.6, 128: 1.04})
    assert findings("slow_dtype", in_region(linear)) == []


def test_finding_needs_a_profile(engine, in_region):
    with polycast.observe() as seen:
        in_region(linear)()
    assert "slow_dtype" not in {found.kind for found in seen.findings}
    assert [each.estimates for matmul in seen.matmuls for each in matmul.rows] == [{}]


def test_rows_of_the_run_decide(engine, profiled, findings, in_region):
    profiled(bfloat16={1: 2.0, 128: 0.5})
    assert findings("slow_dtype", in_region(linear)) == []

    def decode():
        for _ in range(3):
            F.linear(X[:1], WEIGHT)

    (found,) = findings("slow_dtype", in_region(decode))
    assert found.what.startswith("bfloat16 matmuls of 1 row take 2 of float32's time")
    assert findings("slow_dtype", in_region(lambda: (linear(), decode()))) == []  # most of the time goes to 128 rows


def test_recipe_that_computed_the_matmuls_avoids_it(engine, profiled, findings, in_region):
    if not polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8()):
        pytest.skip("this processor has no int8")
    layer = nn.Linear(64, 64)
    profiled(bfloat16=2.0, int8=0.4)
    assert findings("slow_dtype", in_region(lambda: layer(X), recipe=polycast.Int8(min_size=1))) == []
    (found,) = findings("slow_dtype", in_region(lambda: layer(X), recipe=polycast.Int8(min_size=2**20)))
    assert "take 2 of float32's time" in found.what


def test_recipe_fastest_avoids_it(engine, profiled, profile_of, findings, in_region):
    layer = nn.Linear(64, 64)
    profiled(bfloat16=2.0)
    for recipe in (polycast.Fastest(profile_of(bfloat16=4.0)), polycast.Fastest(profile_of(bfloat16=0.2))):
        assert findings("slow_dtype", in_region(lambda: layer(X), recipe=recipe)) == []


def test_few_matmuls_among_many_are_not_found(engine, profiled, findings, in_region):
    profiled(bfloat16=2.0)
    square = torch.randn(64, 64)

    def run():
        torch.mm(X, square)
        for _ in range(99):
            linear()

    assert findings("slow_dtype", in_region(run, policy={"linear": "fp32"})) == []
    assert len(findings("slow_dtype", in_region(run, policy={"mm": "fp32"}))) == 1


def test_recipe_for_inference_is_no_remedy_in_training_nor_for_batches(engine, profiled, findings, in_region):
    profiled(bfloat16=2.0, int8=0.4)
    layer = nn.Linear(64, 64)

    def train():
        with polycast.autocast("cpu"):
            y = layer(X)
        y.float().sum().backward()

    (found,) = findings("slow_dtype", train, layer)
    assert found.remedy == f"{FASTEST.format(1)} avoids that."
    assert found.ops == ("aten::linear", "aten::mm")
    (found,) = findings("slow_dtype", in_region(lambda: torch.randn(3, 128, 8) @ torch.randn(3, 8, 16)))
    assert found.remedy == f"{FASTEST.format(1)} avoids that."


def test_kernel_of_the_backend_counts_for_fastest(engine, profiled, findings, in_region):
    profiled(bfloat16=2.0, bfloat16_kernel=0.6)
    (found,) = findings("slow_dtype", in_region(linear))
    assert f"{FASTEST.format(0.6)} avoids that." in found.remedy


def test_profile_decides_about_an_emulated_dtype(engine, profiled, findings, in_region, hand_made):
    table = polycast.plugin.get_backend("cpu").policies
    hand_made("cpu", default_dtype=torch.bfloat16, policies=table, slow_reason=lambda dtype: "it has no such unit")
    (found,) = findings("slow_dtype", in_region(linear))
    assert found.what == "bfloat16 is emulated: it has no such unit."
    profiled(bfloat16=8.0)
    (found,) = findings("slow_dtype", in_region(linear))
    assert found.what.startswith("bfloat16 is emulated: it has no such unit. bfloat16 matmuls of 128 rows take 8 of")
    profiled(bfloat16=0.5)
    assert findings("slow_dtype", in_region(linear)) == []
    assert findings("slow_dtype", in_region(linear, policy={"linear": "fp32"})) == []


def observed(**seconds):
    """Return an observation of the same linear in each of these dtypes."""
    rows = (MatmulRows("linear", 16, 1, 1e6),)
    matmuls = tuple(
        Matmul("aten::linear", "forward", None, "cpu", dtype=dtype, calls=1, seconds=each, flops=1e6, rows=rows)
        for dtype, each in seconds.items()
    )
    return Observation(Facts(Run(devices={"cpu": ["bfloat16"]}, timing=True), matmuls=matmuls))


def test_times_of_a_run_with_both_dtypes_are_compared():
    (found,) = observed(bfloat16=0.3, float32=0.2).findings
    assert found.what == "bfloat16 matmuls of 16 rows take 1.5 of float32's time on cpu, as timed in this run."
    assert found.remedy == '`recipe="fastest"` or float32 avoids that.'
    assert len((observed(bfloat16=0.3) + observed(float32=0.2)).findings) == 1
    assert observed(bfloat16=0.2, float32=0.2).findings == ()
    assert observed(bfloat16=0.3).findings == ()
    assert observed(bfloat16=0.3, float32=0.0).findings == ()


class SlowProducts(TorchDispatchMode):
    """Takes longer for products in a dtype than all that was before has taken: three times as long."""

    def __init__(self, dtype):
        super().__init__()
        self._dtype = dtype
        self._start = time.perf_counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        begun = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        is_product = function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        while is_product and result.dtype is self._dtype and time.perf_counter() - begun < 3 * (begun - self._start):
            pass
        return result


@pytest.mark.parametrize(("slow", "quick"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_times_of_a_real_run_show_the_slower_dtype(slow, quick, engine, in_region):
    regions = {"bfloat16": {}, "float32": {"policy": {"linear": "fp32"}}}
    with polycast.observe(timing=True) as seen, SlowProducts(getattr(torch, slow)):
        for dtype in (quick, slow):
            in_region(linear, **regions[dtype])()
    assert sorted(each.dtype for each in seen.matmuls) == ["bfloat16", "float32"]
    found = [each for each in seen.findings if each.kind == "slow_dtype"]
    assert [(each.ops, each.count) for each in found] == [(("aten::linear",), 1)] * (slow == "bfloat16")
    for each in found:
        said = re.fullmatch(r"bfloat16 matmuls of 128 rows take (\S+) of float32's time on cpu, as timed .*", each.what)
        assert float(said[1]) >= 3


ROWS = [
    (lambda: F.linear(torch.randn(2, 3, 8), torch.randn(5, 8)), "linear", 6),
    (lambda: torch.mm(torch.randn(7, 8), torch.randn(8, 5)), "matmul", 7),
    (lambda: torch.addmm(torch.randn(5), torch.randn(7, 8), torch.randn(8, 5)), "matmul", 7),
    (lambda: torch.randn(2, 3, 8) @ torch.randn(8, 5), "matmul", 6),
    (lambda: torch.randn(2, 3, 8) @ torch.randn(2, 8, 5), "bmm", 3),
    (lambda: torch.mv(torch.randn(7, 8), torch.randn(8)), "matmul", 1),
    (lambda: nn.Conv2d(4, 6, 3)(torch.randn(2, 4, 7, 9)), "conv2d", 2 * 5 * 7),
    (lambda: F.scaled_dot_product_attention(*torch.randn(3, 2, 4, 5, 8)), "scaled_dot_product_attention", 5),
]


@pytest.mark.parametrize(("run", "kind", "rows"), ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_rows_are_those_of_a_profile(engine, run, kind, rows, in_region):
    with polycast.observe() as seen:
        in_region(run, 2)()
    (matmul,) = seen.matmuls
    assert [(each.op, each.rows, each.calls, each.flops) for each in matmul.rows] == [(kind, rows, 2, matmul.flops)]


def test_many_numbers_of_rows_are_rounded_up(engine):
    with polycast.observe() as seen, polycast.autocast("cpu"):
        for rows in range(1, 41):
            torch.mm(torch.ones(rows, 2), torch.ones(2, 2))
    (matmul,) = seen.matmuls
    assert [each.rows for each in matmul.rows] == [*range(1, 17), 32, 64]
    assert (sum(each.calls for each in matmul.rows), sum(each.flops for each in matmul.rows)) == (40, matmul.flops)


def test_estimates_are_saved_and_added(engine, profiled, in_region, tmp_path):
    profiled(bfloat16=2.0)
    with polycast.observe() as seen:
        in_region(linear)()
    seen.save(tmp_path / "seen.json")
    loaded = Observation.load(tmp_path / "seen.json")
    assert loaded == seen
    assert [found.kind for found in loaded.findings] == ["slow_dtype"]
    assert (seen + loaded).matmuls[0].rows[0].estimates["bfloat16"] == pytest.approx(2 * 2 * 128e-6)


def test_ops_that_measure_a_device_are_not_counted(engine):
    with polycast.observe(), polycast.observe() as seen:
        with events.own_work.during():
            torch.mm(WEIGHT, WEIGHT)
        torch.exp(WEIGHT)
    assert [op.op for op in seen.ops] == ["aten::exp"]
