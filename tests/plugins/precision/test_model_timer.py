"""``tune(objective="time")``: the choice for given times or by a profile, and the race."""

import math
import time

import pytest
import torch
from tests.plugins.models import Defined
from torch import nn

import polycast
from polycast_plugins.fastest import estimates
from polycast_plugins.precision import timing
from polycast_plugins.precision.calls import ModelCall, in_this_thread, watched
from polycast_plugins.precision.candidates import Blocks
from polycast_plugins.precision.minimal_set import NO_POLICY, Choice
from polycast_plugins.precision.profiling_run import profile_runs
from polycast_plugins.precision.timing import (
    BY_PROFILE,
    FLOAT32,
    PLAIN_REGION,
    ModelTimer,
    ModuleClock,
    Race,
    pick_fastest,
)
from polycast_plugins.precision.tuner import modules_faster_in_float32


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


@pytest.fixture
def timer():
    """Return the timer of a model, and its modules in the order of their calls."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    return timer_of(model)


def timer_of(model):
    call = ModelCall.of(model, torch.randn(2, 4))
    profile, _ = profile_runs(model, (call,), "cpu")
    timer = ModelTimer(model, (call,), polycast.autocast("cpu"), profile)
    return timer, Blocks(model, profile).in_order_of_calls()


NAMES = ["", "0", "1", "1.0", "1.1", "2"]


def seconds(**changed):
    return {name: changed.get("m" + name.replace(".", "_"), 0.0 if name in ("", "1") else 10.0) for name in NAMES}


SLOW = {"m1_0": 50.0, "m1_1": 50.0}
OF_TWO = (seconds(m0=1.0, m2=1.0), seconds(m0=5.0, m2=8.0, **SLOW), seconds(m0=8.0, m2=5.0, **SLOW))
OF_THREE = (seconds(m1_0=1.0), seconds(m2=1.0))


@pytest.mark.parametrize(
    ("times", "rule", "needed", "expected"),
    [
        ((seconds(), seconds(m0=1.0)), 0.5, NO_POLICY, Choice(("0",))),
        ((seconds(), seconds(m0=100.0)), 0.5, NO_POLICY, NO_POLICY),
        ((seconds(), seconds(m0=9.8)), 0.5, NO_POLICY, NO_POLICY),  # less than the overhead of a rule
        ((seconds(), seconds(m1_0=9.7, m1_1=9.7)), 0.5, NO_POLICY, Choice(("1", "1.0", "1.1"))),  # one rule
        ((seconds(), dict.fromkeys(NAMES, 0.0)), 0.5, NO_POLICY, Choice(tuple(NAMES))),
        ((seconds(), seconds(m2=100.0)), 0.5, Choice(("2",)), Choice(("2",))),  # at any cost
        ((seconds(m0=1.0), *OF_THREE), 0.5, NO_POLICY, Choice(("2",), ("1.0",))),
        ((seconds(), *OF_THREE), 20.0, NO_POLICY, NO_POLICY),
        (OF_TWO, 0.5, Choice((), ("0", "2")), Choice(("2",), ("0",))),
        (OF_TWO, 0.5, Choice(("0",), ("2",)), Choice(("0", "2"))),
    ],
    ids=range(10),
)
def test_each_module_has_its_fastest_precision(timer, times, rule, needed, expected, monkeypatch):
    """The times are those of the region, of float32 and, with a recipe, of the fast dtype in between."""
    timer, modules = timer
    monkeypatch.setattr(ModelTimer, "_seconds_by_module", lambda self: list(times))
    monkeypatch.setattr(timing, "rule_overhead", lambda *_: rule)
    found = timer.fastest_modules(modules, needed)
    assert (set(found.members), set(found.in_fast_dtype)) == (set(expected.members), set(expected.in_fast_dtype))


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
    return polycast.tune(model, x, **{"tolerance": 1e-2, "objective": "time", **arguments})


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


def test_the_policy_is_empty_where_the_plain_region_is_the_fastest_and_names_the_inputs_and_the_machine(quick):
    quick(PLAIN_REGION)
    tuned = tune(nn.Linear(8, 8), torch.randn(4, 8))
    assert (tuned.policy.modules, tuned.evidence.timings.chosen) == ({}, PLAIN_REGION)
    assert "tuned for time with float32 (4, 8) on " in tuned.policy.name
    assert torch.__version__ in tuned.policy.name
    assert "ms per call: float32 2e+03, the region without a policy 1e+03" in str(tuned.evidence)


def test_all_modules_are_in_float32_where_the_model_does_not_run_in_the_region():
    def forward(self, x):
        if x.dtype is not torch.float32:
            raise ValueError(x.dtype)
        return x

    timer, modules = timer_of(nn.Sequential(nn.Linear(4, 4), Defined(forward)))
    assert timer.fastest_modules(modules, NO_POLICY).members == ("", "0", "1")
    tried = {"linear": [Choice(("linear",))]}
    assert timer.fastest_ops(tried, NO_POLICY, lambda choice: polycast.Policy()) == NO_POLICY


@pytest.fixture
def profiled(profile_of, monkeypatch):
    """Return a function that gives cpu a profile with the times of bfloat16, by op, relative to float32."""
    return lambda **ratios: monkeypatch.setattr(
        estimates, "find_profile", lambda device_type: profile_of(bfloat16=ratios)
    )


def new_model():
    conv, out = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 16)
    return Defined(lambda self, x: self.out(self.conv(x).relu().flatten(1)), conv=conv, out=out)


X = torch.randn(2, 3, 8, 8)


def faster_in_float32(model):
    with torch.no_grad():
        found = modules_faster_in_float32(model, lambda: model(X), polycast.autocast("cpu"))
    names = {module: name for name, module in model.named_modules()}
    return None if found is None else [names[each] for each in found]


def test_modules_are_chosen_by_their_ops(engine, profiled):
    model = new_model()
    profiled(linear=2.0, conv2d=0.5)
    assert faster_in_float32(model) == ["out"]
    profiled(linear=0.5, conv2d=2.0)
    assert faster_in_float32(model) == ["conv"]
    profiled(other=0.99)
    assert faster_in_float32(model) == []


def test_modules_that_stay_in_float32_anyway_are_not_chosen(engine, profiled):
    model = new_model()
    profiled(linear=2.0, conv2d=2.0)
    with polycast.apply_policy(model, polycast.Policy(modules={"conv": "fp32"})):
        assert faster_in_float32(model) == ["out"]


def test_without_a_profile_there_is_no_choice():
    assert faster_in_float32(new_model()) is None


def test_choice_is_timed_and_returned_if_it_is_the_fastest(profiled, quick):
    profiled(linear=2.0, conv2d=0.5)
    quick(BY_PROFILE)
    tuned = tune(new_model(), X, tolerance=0.1)
    assert tuned.evidence.members == ("out",)
    assert [*tuned.evidence.timings.seconds][:3] == ["float32", PLAIN_REGION, BY_PROFILE]
    assert tuned.policy.modules["out"] == "fp32"


def test_choice_that_does_not_keep_the_tolerance_is_not_timed(profiled, quick):
    profiled(other=2.0)
    quick(PLAIN_REGION)
    # The budget is spent on the plain region and on float32.
    tuned = tune(new_model(), X, metric=lambda *_: 1.0, tolerance=2.0, budget=2)
    assert BY_PROFILE not in tuned.evidence.timings.seconds


@pytest.mark.parametrize("over", ["modules", "ops"])
@pytest.mark.parametrize("objective", ["accuracy", "time"])
def test_recipe_fastest_can_be_tuned(profile_of, tmp_path, quick, over, objective):
    profile_of(bfloat16=2.0).save(tmp_path / "profile.json")
    quick(PLAIN_REGION)
    recipe = polycast.Fastest(str(tmp_path / "profile.json"))
    tuned = tune(new_model(), X, tolerance=0.1, recipe=recipe, over=over, objective=objective)
    assert tuned.met
    assert tuned.evidence.recipe == recipe
    assert tuned.evidence.to_dict()["recipe"] == "fastest"
    tuned.save(tmp_path / "policy.toml")
    assert polycast.Policy.load(tmp_path / "policy.toml") == tuned.policy
