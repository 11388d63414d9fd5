"""Which fast dtypes are slow: by the profile if there is one, else by the backend."""

import pytest
import torch

import polycast
from polycast.plugin import find_slow_dtype
from polycast_plugins.fastest import estimates
from polycast_plugins.fastest.measurement import Measurement
from polycast_plugins.observe.counting import slow_reasons


@pytest.fixture
def profiled(hand_made, monkeypatch):
    """Return a function that serves cpu by a backend, with a profile of these times of bfloat16 relative to float32."""

    def profile(ratios, reason=None, **changes):
        backend = hand_made("cpu", default_dtype=torch.bfloat16, slow_reason=lambda dtype: reason)
        times = [Measurement("linear", rows, "float32", 1e-3) for rows in ratios]
        times += [Measurement("linear", rows, "bfloat16", 1e-3 * each, **changes) for rows, each in ratios.items()]
        found = polycast.DeviceProfile("cpu", "a processor", 1, {}, {}, tuple(times), 1e10)
        monkeypatch.setattr(estimates, "find_profile", lambda device_type: found)
        assert polycast.plugin.get_backend("cpu") is backend
        return backend

    return profile


TIMES = "(time of linear layers relative to float32: {0} for 1 row and {0} for 128 rows)"
CASES = {
    "fast by the profile": ({128: 0.5, 1024: 1.05}, {"reason": "why"}, None),
    "slow by the profile": ({128: 1.3, 1024: 1.83}, {}, "matrix products of 1024 rows take 1.8 of float32's time"),
    "slow for a reason": ({128: 1.3}, {"reason": "why"}, f"why {TIMES.format(1.3)}"),
    "extrapolated": ({128: 1.6}, {"extrapolated": True}, "matrix products of 128 rows take 1.6 of float32's time"),
    "noisy": ({128: 1.8}, {"noisy": True}, None),
    "noisy, and slow for a reason": ({128: 0.8}, {"noisy": True, "reason": "why"}, f"why {TIMES.format(0.8)}"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_profile_decides_whether_a_dtype_is_slow(profiled, case):
    ratios, options, reason = CASES[case]
    found = find_slow_dtype(profiled(ratios, **options), torch.bfloat16)
    assert (None if found is None else found.reason) == reason
    told = reason and options.get("reason")
    assert slow_reasons({"cpu": ["bfloat16"]}) == ({"cpu bfloat16": told} if told else {})


def test_dtype_that_was_not_measured_is_left_to_the_backend(profiled):
    assert find_slow_dtype(profiled({128: 0.5}, reason="why"), torch.float16).reason == "why"


@pytest.mark.parametrize("named", ["", "/nowhere.json"], ids=["none", "a bad one"])
def test_without_a_profile_the_backend_is_asked_and_the_recipe_suggested(hand_made, monkeypatch, named):
    monkeypatch.setenv("POLYCAST_PROFILE", named)
    found = find_slow_dtype(hand_made("cpu", slow_reason=lambda dtype: "it says so"), torch.bfloat16)
    assert found.reason == "it says so (`polycast profile cpu` measures how much)"
    assert found.faster_recipes() == {"fastest": ""}
