"""``tune`` and the profile of a device: its choice of modules, and the recipe "fastest"."""

import pytest
import torch
from tests.plugins.models import Defined
from torch import nn

import polycast
from polycast_plugins.fastest import estimates
from polycast_plugins.precision.timing import BY_PROFILE, PLAIN_REGION
from polycast_plugins.precision.tuner import modules_faster_in_float32


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


def tune(**arguments):
    return polycast.tune(new_model(), X, tolerance=0.1, **arguments)


def test_choice_is_timed_and_returned_if_it_is_the_fastest(profiled, quick):
    profiled(linear=2.0, conv2d=0.5)
    quick(BY_PROFILE)
    tuned = tune(objective="time")
    assert tuned.evidence.members == ("out",)
    assert [*tuned.evidence.timings.seconds][:3] == ["float32", PLAIN_REGION, BY_PROFILE]
    assert tuned.policy.modules["out"] == "fp32"


def test_choice_that_does_not_keep_the_tolerance_is_not_timed(profiled, quick):
    profiled(other=2.0)
    quick(PLAIN_REGION)
    tuned = polycast.tune(
        new_model(), X, lambda *_: 1.0, tolerance=2.0, objective="time", budget=2
    )  # the budget is spent on the plain region and on float32
    assert BY_PROFILE not in tuned.evidence.timings.seconds


@pytest.mark.parametrize("over", ["modules", "ops"])
@pytest.mark.parametrize("objective", ["accuracy", "time"])
def test_recipe_fastest_can_be_tuned(profile_of, tmp_path, quick, over, objective):
    profile_of(bfloat16=2.0).save(tmp_path / "profile.json")
    quick(PLAIN_REGION)
    tuned = tune(recipe=polycast.Fastest(str(tmp_path / "profile.json")), over=over, objective=objective)
    assert tuned.met
    assert tuned.evidence.recipe == polycast.Fastest(str(tmp_path / "profile.json"))
    assert tuned.evidence.to_dict()["recipe"] == "fastest"
    tuned.save(tmp_path / "policy.toml")
    assert polycast.Policy.load(tmp_path / "policy.toml") == tuned.policy
