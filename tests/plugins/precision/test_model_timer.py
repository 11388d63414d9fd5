"""``tune(objective="time")``: the choice for given times, and the race."""

import math
import time

import pytest
import torch
from tests.plugins.models import Defined
from torch import nn

import polycast
from polycast_plugins.precision import timing
from polycast_plugins.precision.calls import ModelCall, in_this_thread, watched
from polycast_plugins.precision.candidates import Blocks
from polycast_plugins.precision.minimal_set import NO_POLICY, Choice
from polycast_plugins.precision.profiling_run import profile_runs
from polycast_plugins.precision.timing import FLOAT32, PLAIN_REGION, ModelTimer, ModuleClock, Race, pick_fastest


class Made(Race):
    """A finished race, with the same times in each round."""

    def __init__(self, **seconds):
        self.sides = dict.fromkeys(seconds)
        self.rounds = [seconds] * 3


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"plain": 1.0, "all": 2.0, "some": 3.0}, "plain"),
        ({"plain": 2.0, "all": 1.0, "some": 3.0}, "all"),
        ({"plain": 3.0, "all": 2.0, "some": 1.0}, "some"),
        ({"plain": 1.01, "all": 1.005, "some": 1.0}, "plain"),
        ({"plain": 2.0, "all": 1.01, "some": 1.0}, "all"),
    ],
    ids=str,
)
def test_the_fastest_side_is_chosen_and_in_a_tie_the_simpler_one(seconds, chosen):
    timings = pick_fastest(Made(float32=1.0, **seconds), list(seconds))
    assert timings.chosen == chosen
    assert timings.seconds == {"float32": 1.0, **seconds}


def proposed(model, fast, float32, monkeypatch, rule=0.5, forced=()):
    """Return the modules that are chosen for float32."""
    return set(chosen(model, [fast, float32], monkeypatch, rule, Choice(tuple(forced))).members)


def chosen(model, seconds, monkeypatch, rule=0.5, needed=NO_POLICY, exclude=(), candidates=None):
    call, region = ModelCall.of(model, torch.randn(2, 4)), polycast.autocast("cpu")
    profile, _ = profile_runs(model, (call,), "cpu")
    timer = ModelTimer(model, (call,), region, profile)
    monkeypatch.setattr(ModelTimer, "_seconds_by_module", lambda self: seconds)
    monkeypatch.setattr(timing, "rule_overhead", lambda *_: rule)
    return timer.fastest_modules(
        Blocks(model, profile, dict.fromkeys(exclude, "fp32"), candidates).in_order_of_calls(), needed
    )


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))


NAMES = ["", "0", "1", "1.0", "1.1", "2"]


def seconds(**changed):
    return {name: changed.get("m" + name.replace(".", "_"), 0.0 if name in ("", "1") else 10.0) for name in NAMES}


def test_each_module_has_its_faster_precision(model, monkeypatch):
    assert proposed(model, seconds(), seconds(m0=1.0), monkeypatch) == {"0"}
    assert proposed(model, seconds(), seconds(m0=100.0), monkeypatch) == set()


def test_no_rule_whose_overhead_exceeds_its_gain(model, monkeypatch):
    assert proposed(model, seconds(), seconds(m0=9.8), monkeypatch) == set()


def test_with_a_recipe_each_module_has_the_fastest_of_three(model, monkeypatch):
    times = [seconds(m0=1.0), seconds(m1_0=1.0), seconds(m2=1.0)]
    assert chosen(model, times, monkeypatch) == Choice(members=("2",), in_fast_dtype=("1.0",))
    assert chosen(model, [seconds(), *times[1:]], monkeypatch, rule=20.0) == NO_POLICY


def test_a_module_that_must_leave_the_recipe_has_the_faster_of_the_other_two(model, monkeypatch):
    slow = {"m1_0": 50.0, "m1_1": 50.0}
    times = [seconds(m0=1.0, m2=1.0), seconds(m0=5.0, m2=8.0, **slow), seconds(m0=8.0, m2=5.0, **slow)]
    assert chosen(model, times, monkeypatch, needed=Choice(in_fast_dtype=("0", "2"))) == Choice(
        members=("2",), in_fast_dtype=("0",)
    )
    assert chosen(model, times, monkeypatch, needed=Choice(members=("0",), in_fast_dtype=("2",))) == Choice(
        members=("0", "2")
    )


def test_one_rule_serves_all_modules_inside(model, monkeypatch):
    faster = seconds(m1_0=9.7, m1_1=9.7)
    assert proposed(model, seconds(), faster, monkeypatch) == {"1", "1.0", "1.1"}


def test_one_rule_suffices_where_float32_is_faster_everywhere(model, monkeypatch):
    everywhere = dict.fromkeys(NAMES, 0.0)
    assert proposed(model, seconds(), everywhere, monkeypatch) == set(NAMES)


def test_a_module_that_needs_float32_gets_it_at_any_cost(model, monkeypatch):
    assert proposed(model, seconds(), seconds(m2=100.0), monkeypatch, forced={"2"}) == {"2"}


def test_a_module_is_timed_without_the_modules_that_it_calls():
    def wait(self, x):
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end:
            pass
        return x

    inner = Defined(wait)
    model, clock = nn.Sequential(inner, inner), ModuleClock("cpu")
    with watched(model, in_this_thread(clock)):
        model(torch.ones(1))
    assert clock.seconds[inner] >= 0.04
    assert clock.seconds[model] < 0.02


def tune(model, x, **arguments):
    return polycast.tune(model, x, tolerance=1e-2, objective="time", **arguments)


def test_the_policy_is_empty_where_the_plain_region_is_the_fastest(quick):
    quick(PLAIN_REGION)
    tuned = tune(nn.Linear(8, 8), torch.randn(4, 8))
    assert tuned.policy.modules == {}
    assert tuned.evidence.timings.chosen == PLAIN_REGION


def test_the_model_is_in_float32_where_that_is_the_fastest(quick):
    quick("all in float32")
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    tuned = tune(model, x)
    assert tuned.policy.modules == {"": "fp32"}
    assert set(tuned.evidence.timings.seconds) >= {FLOAT32, PLAIN_REGION, "all in float32"}
    expected = model(x)
    with polycast.apply_policy(model, tuned.policy), polycast.autocast("cpu"):
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("over", ["modules", "ops"])
def test_the_fastest_keeps_the_tolerance(quick, over):
    quick(PLAIN_REGION)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight.mul_(1e6)
    tuned = tune(model, torch.randn(4, 8), dtype=torch.float16, over=over)
    assert tuned.evidence.plain == math.inf
    assert tuned.met
    assert PLAIN_REGION not in tuned.evidence.timings.seconds


def test_the_name_of_the_policy_has_the_inputs_and_the_machine(quick):
    quick(PLAIN_REGION)
    tuned = tune(nn.Linear(8, 8), torch.randn(4, 8))
    assert "tuned for time with float32 (4, 8) on " in tuned.policy.name
    assert torch.__version__ in tuned.policy.name
    assert "ms per call: float32 2e+03, the region without a policy 1e+03" in str(tuned.evidence)


@pytest.mark.slow
@pytest.mark.parametrize("over", ["modules", "ops"])
def test_a_real_race_is_run(over):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    timings = tune(model, x, over=over).evidence.timings
    assert all(0 < each < 1 for each in timings.seconds.values())
    assert timings.chosen in timings.seconds


def test_all_modules_are_in_float32_where_the_model_does_not_run_in_the_region():
    def forward(self, x):
        if x.dtype is not torch.float32:
            raise ValueError(x.dtype)
        return x

    strict = Defined(forward)
    model = nn.Sequential(nn.Linear(4, 4), strict)
    call, region = ModelCall.of(model, torch.randn(2, 4)), polycast.autocast("cpu")
    profile, _ = profile_runs(model, (call,), "cpu")
    timer = ModelTimer(model, (call,), region, profile)
    assert timer.fastest_modules(Blocks(model, profile).in_order_of_calls(), NO_POLICY).members == ("", "0", "1")
    tried = {"linear": [Choice(("linear",))]}
    assert timer.fastest_ops(tried, NO_POLICY, lambda choice: polycast.Policy()) == NO_POLICY
