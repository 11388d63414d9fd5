"""Calls that a recipe would slow down, by the device's profile, run in the fast dtype."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polycast
from polycast import Int8, autocast
from polycast_plugins.fastest import estimates
from polycast_plugins.fastest import profile as profiles

pytestmark = pytest.mark.usefixtures("engine", "no_grad", "int8_kernels")

WEIGHT = nn.Parameter(torch.randn(64, 64))
RECIPE = Int8(min_size=1)


X = torch.randn(4, 64)
EXPECTED = F.linear(X.bfloat16(), WEIGHT.detach().bfloat16())


@pytest.fixture
def use(monkeypatch, tmp_path, profile_of):
    """Return a function that makes the profile of this machine."""

    def use(noisy=False, **ways):
        path = tmp_path / "profile.json"
        profile = profile_of(overhead=1e-15, **{"cast": 1e-15, **ways})
        replace(profile, measurements=tuple(replace(each, noisy=noisy) for each in profile.measurements)).save(path)
        monkeypatch.setenv("POLYCAST_PROFILE", str(path))
        profiles.forget()

    yield use
    profiles.forget()


@pytest.fixture
def declined(recipe_counts):
    """Return a function that makes a call in a region with int8, and returns why the recipe declined it; "" if not."""

    def declined():
        with recipe_counts() as counts, autocast("cpu", recipe=RECIPE):
            F.linear(X, WEIGHT)
        return [record.declined for record in counts.records()]

    return declined


def test_a_call_that_int8_slows_down_runs_in_the_fast_dtype(use, declined):
    use(int8=1.0, bfloat16=0.5)
    assert declined() == ["int8 takes 2 of bfloat16's time, by the profile"]
    for _ in range(2):  # as Python decides, and as the native engine keeps it
        with autocast("cpu", recipe=RECIPE):
            assert torch.equal(F.linear(X, WEIGHT), EXPECTED)
            text = str(polycast.explain("linear", X, WEIGHT, device_type="cpu"))
        assert "int8 takes 2 of bfloat16's time, by the profile" in text


def test_another_profile_decides_again_for_known_sizes(use):
    for seconds in (0.5, 2.0, 0.5):
        use(int8=seconds, bfloat16=1.0)
        for _ in range(2):
            with autocast("cpu", recipe=RECIPE):
                assert torch.equal(F.linear(X, WEIGHT), EXPECTED) == (seconds > 1)


def test_another_number_of_threads_decides_again_for_known_sizes(monkeypatch, profile_of):
    by_threads = {
        threads: profile_of(overhead=1e-15, cast=1e-15, int8=seconds, bfloat16=1.0)
        for threads, seconds in ((1, 0.5), (2, 2.0))
    }
    monkeypatch.setattr(estimates, "find", lambda device: by_threads[torch.get_num_threads()])
    with autocast("cpu", recipe=RECIPE):
        for threads in (1, 1, 2, 2, 1):
            torch.set_num_threads(threads)
            assert torch.equal(F.linear(X, WEIGHT), EXPECTED) == (threads == 2)


COMPUTED = {
    "though float32 is faster": {"int8": 2.0, "bfloat16": 9.0},
    "int8 was not measured": {"bfloat16": 0.5},
    "the fast dtype was not measured": {"int8": 9.0, "float16": 0.1},
    "almost equal": {"int8": 1.05, "bfloat16": 1.0},
    "noisy": {"noisy": True, "int8": 1.0, "bfloat16": 0.5},
    "int8 saves a conversion": {"int8": 1.0, "bfloat16": 0.5, "cast": 1e-6},
}


@pytest.mark.parametrize("ways", COMPUTED.values(), ids=COMPUTED)
def test_a_call_is_computed_that_int8_may_not_slow_down(use, declined, ways):
    use(**ways)
    assert declined() == [""]


def test_a_call_is_computed_without_a_profile(declined):
    assert declined() == [""]


def test_the_fast_dtype_of_the_region_counts(use, declined, recipe_counts):
    use(int8=1.0, bfloat16=0.5, float16=9.0)
    assert declined() == ["int8 takes 2 of bfloat16's time, by the profile"]
    with recipe_counts() as counts, autocast("cpu", torch.float16, recipe=RECIPE):
        F.linear(X, WEIGHT)
    assert [record.declined for record in counts.records()] == [""]


def test_traced_calls_fall_back_too(use):
    use(int8=1.0, bfloat16=0.5)
    compiled = torch.compile(lambda x: F.linear(x, WEIGHT), backend="eager")
    with autocast("cpu", recipe=RECIPE):
        assert torch.equal(compiled(X), EXPECTED)


def test_a_small_convolution_is_declined_by_the_times_of_larger_ones(use):
    use(int8=2.0, bfloat16=1.0)
    image, weight = torch.randn(1, 8, 6, 6), torch.randn(8, 8, 3, 3)
    assert estimates.slower_reason("cpu", "int8", "aten::conv2d", (image, weight)) is not None
