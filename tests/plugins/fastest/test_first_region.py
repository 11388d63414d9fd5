"""The first region with recipe "fastest": it measures the device, says so, and works where that is not possible."""

import dataclasses
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polycast
from polycast import Fastest, autocast
from polycast_plugins.fastest.profile import forget

X, WEIGHT = torch.randn(128, 16), nn.Parameter(torch.randn(16, 16), requires_grad=False)
MEASURING = "polycast: measuring what is fast on cpu with 1 thread, once for this torch ...\n"


@pytest.fixture(autouse=True)
def one_thread(engine, capsys):
    """Run on one thread; leave out what is said while the engine is built."""
    torch.set_num_threads(1)
    polycast.install("cpu")
    capsys.readouterr()


def region(**settings):
    with autocast("cpu", **{"recipe": "fastest", **settings}):
        return F.linear(X, WEIGHT)


def test_the_first_region_measures_and_says_so_and_later_ones_do_not(measured, kept, capsys):
    first = region()
    assert capsys.readouterr().err == MEASURING
    assert measured.count == 1
    assert len(list(kept.glob("*.json"))) == 1
    for again in (region(), region(recipe=Fastest(), cache=polycast.WeightCache()), region(dtype=torch.float16)):
        assert again.shape == first.shape
    assert (measured.count, capsys.readouterr().err) == (1, "")


@pytest.mark.parametrize(("times", "way"), [({"bfloat16": 4e-3}, "float32"), ({"float32": 4e-3}, "bfloat16")], ids=str)
def test_what_is_measured_decides(measured, times, way):
    measured.times.update(times)
    with autocast("cpu", recipe="fastest"):
        assert polycast.explain("linear", X, WEIGHT, device_type="cpu").way == way
        result = F.linear(X, WEIGHT)
    expected = F.linear(X, WEIGHT).bfloat16() if way == "float32" else F.linear(X.bfloat16(), WEIGHT.bfloat16())
    assert torch.equal(result, expected)


def test_each_number_of_threads_is_measured(measured):
    layer = nn.Sequential(nn.Linear(16, 16))
    with polycast.apply_policy(layer, polycast.Policy(modules={"0": "fastest"})):
        for number in (1, 2):
            torch.set_num_threads(number)
            region()
            with autocast("cpu"):
                layer(X)
            assert measured.count == number
    with polycast.apply_policy(layer, polycast.Policy(modules={"0": "fastest"})), autocast("cpu"):
        for number in (3, 4):
            torch.set_num_threads(number)
            layer(X)
            assert measured.count == number


@pytest.mark.parametrize("settings", [{"enabled": False}, {"recipe": None}, {"recipe": "none"}], ids=str)
def test_other_regions_do_not_measure(settings, measured, capsys):
    region(**settings)
    assert (measured.count, capsys.readouterr().err) == (0, "")


def test_a_profile_that_is_given_is_not_measured(measured, profile_of, tmp_path, monkeypatch):
    path = tmp_path / "machine.json"
    profile_of(bfloat16=1.0).save(path)
    region(recipe=Fastest(profile_of(bfloat16=1.0)))
    region(recipe=Fastest(str(path)))
    monkeypatch.setenv("POLYCAST_PROFILE", str(path))
    region()
    assert measured.count == 0


def test_a_device_that_cannot_be_measured_gives_a_warning_and_the_fast_dtype(measured):
    def fail():
        raise RuntimeError("cpu cannot be measured: it is on fire.")

    measured.instead = fail
    expected = region(recipe=None)
    with pytest.warns(polycast.errors.RecipeDisabledWarning) as warned:
        assert torch.equal(region(), expected)
    assert [str(each.message) for each in warned] == [
        "Fastest() cannot be used on cpu: cpu cannot be measured: it is on fire. The region runs in the fast dtype."
    ]
    measured.instead = lambda: None
    region()
    assert measured.count == 2


def test_what_is_measured_may_not_have_a_region_with_the_recipe(measured):
    measured.instead = region
    with pytest.warns(
        polycast.errors.RecipeDisabledWarning, match="the profile of cpu was requested while it is measured"
    ):
        region()


@pytest.mark.parametrize("given", ["a profile", "a path"])
def test_a_profile_of_another_device_is_an_error(given, profile_of, tmp_path):
    other = dataclasses.replace(profile_of(bfloat16=1.0), device_type="xpu")
    other.save(tmp_path / "xpu.json")
    recipe = Fastest(other if given == "a profile" else str(tmp_path / "xpu.json"))
    with pytest.raises(ValueError, match=r"^Fastest\(.*\) has a profile of xpu, and the region is for cpu$"):
        autocast("cpu", recipe=recipe)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has other permissions")
@pytest.mark.parametrize("asks", [region, lambda: polycast.profile("cpu")], ids=["a region", "profile()"])
def test_a_profile_on_disk_that_is_ignored_is_reported_once(asks, measured, kept, capsys):
    polycast.profile("cpu")
    (path,) = kept.glob("*.json")
    path.chmod(0o666)
    forget()  # as in another process
    capsys.readouterr()
    asks()
    ignored, measuring = capsys.readouterr().err.splitlines(keepends=True)
    reason = f"{path} can be written by others (-rw-rw-rw-), so it may be "
    assert ignored.startswith(f"polycast: the profile on disk is ignored: {reason}")
    assert measuring == MEASURING
    region()
    polycast.profile("cpu", refresh=True)
    assert capsys.readouterr().err == MEASURING


@pytest.mark.slow
def test_a_plain_region_imports_nothing_of_the_plugin(launch):
    program = """
import sys, warnings, torch, polycast
warnings.simplefilter("ignore", polycast.errors.SlowDtypeWarning)  # which names what is faster
with polycast.autocast("cpu"):
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
print([name for name in sys.modules if name.startswith("polycast_plugins.fastest")])
"""
    assert launch(program).stdout == "[]\n"
