"""Ask the backend, when a region is constructed: once if it affirms, and again after `refresh`.

Each region is made several times, since the native engine keeps the settings of the first.
"""

from collections.abc import Sequence

import pytest
import torch
from tests.core.rounding import Rounded

import polycast
from polycast import CastPolicy, autocast
from polycast.plugin import Availability, Recipe, refresh
from polycast.policy.recipe import kinds

from .made_region import made

pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture
def backend(hand_made):
    return hand_made("cpu", default_dtype=torch.bfloat16, recipe_availability=lambda recipe: Availability(True))


def test_a_backend_that_is_registered_serves_the_next_region(hand_made):
    x = torch.ones(2, 2)

    def found():
        with made("cpu") as region:
            return region.fast_dtype, torch.mm(x, x).dtype, torch.exp(x.half()).dtype

    of_the_built_in = found()
    policies = {"aten::mm": CastPolicy.FP32, "aten::exp": CastPolicy.PASSTHROUGH}
    hand_made("cpu", default_dtype=torch.float16, policies=policies)
    assert found() == (torch.float16, torch.float32, torch.float16)
    polycast.plugin.unregister_backend("cpu")
    assert found() == of_the_built_in == (torch.bfloat16, torch.bfloat16, torch.float16)


def test_an_available_device_is_asked_once(backend, monkeypatch):
    asked = []
    monkeypatch.setattr(backend, "availability", lambda: asked.append("device") or Availability(True), raising=False)
    assert made("cpu")._enabled
    assert made("cpu", cache_enabled=False)._enabled
    assert polycast.is_autocast_available("cpu")
    assert asked == ["device"]


def test_an_unavailable_device_is_asked_again(backend, monkeypatch):
    answers = [Availability(True), Availability(False, "unplugged"), Availability(False, "unplugged")]
    monkeypatch.setattr(backend, "availability", lambda: answers.pop(), raising=False)
    for _ in range(2):
        with pytest.warns(polycast.errors.AutocastDisabledWarning, match="unplugged"):
            assert not autocast("cpu")._enabled
    assert made("cpu")._enabled


@pytest.mark.parametrize(
    ("arguments", "asked", "answer", "reason"),
    [
        ({}, "availability", lambda: Availability(False, "unplugged"), "unplugged"),
        ({"dtype": torch.float16}, "supported_dtypes", lambda: (torch.bfloat16,), "target dtype is not supported"),
        ({"recipe": "rounded"}, "recipe_availability", lambda recipe: Availability(False, "no int8"), "no int8"),
    ],
    ids=["device", "dtype", "recipe"],
)
def test_refresh_asks_again_what_can_be_used(backend, monkeypatch, arguments, asked, answer, reason):
    before = made("cpu", **arguments)
    assert before._enabled
    monkeypatch.setattr(backend, asked, answer, raising=False)
    assert made("cpu", **arguments)._settings == before._settings
    refresh("cpu:0")
    with pytest.warns(polycast.errors.AutocastDisabledWarning, match=reason):
        assert autocast("cpu", **arguments)._settings != before._settings


def test_what_a_recipe_is_resolved_to_is_kept_until_a_refresh_or_another_number_of_threads(backend):
    class Asked(Recipe):
        kind = "asked"
        plan_class = Rounded.plan_class
        count: int = 0
        ops: Sequence[str] = ("mm",)

        def resolved(self, device_type, measure):
            asked.append(device_type)
            return Asked(len(asked))

    asked, before = [], torch.get_num_threads()
    changes = (lambda: None, lambda: refresh("cpu"), lambda: torch.set_num_threads(before + 1))
    try:
        for count, change in enumerate(changes, 1):
            change()
            for arguments in ({"recipe": "asked"}, {"recipe": Asked(), "policy": {"softmax": "fp32"}}):
                assert made("cpu", **arguments)._settings.override.recipe.count == count
    finally:
        torch.set_num_threads(before)
        del kinds["asked"]
    assert asked == ["cpu"] * 3


def test_what_is_resolved_while_a_backend_refreshes_is_not_kept(backend, monkeypatch):
    def asked():
        refresh("cpu")
        return Availability(True)

    monkeypatch.setattr(backend, "availability", asked, raising=False)
    assert made("cpu")._enabled
    monkeypatch.setattr(backend, "availability", lambda: Availability(False, "unplugged"), raising=False)
    with pytest.warns(polycast.errors.AutocastDisabledWarning, match="unplugged"):
        assert not autocast("cpu")._enabled


def test_a_device_without_a_backend_can_be_refreshed():
    refresh("meta")


def test_an_interrupt_while_the_device_is_asked_is_raised(backend, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(backend, "availability", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        autocast("cpu")


def test_a_backend_may_make_regions_while_it_is_asked(backend, monkeypatch):
    inside = []

    def asked():
        monkeypatch.undo()
        inside.append(made("cpu", torch.float16).fast_dtype)
        return Availability(True)

    monkeypatch.setattr(backend, "availability", asked, raising=False)
    assert made("cpu").fast_dtype is torch.bfloat16
    assert inside == [torch.float16]


def test_the_backend_of_a_region_that_is_disabled_is_not_asked_about_recipes(hand_made):
    asked = []
    hand_made("cpu", recipe_availability=lambda recipe: asked.append(recipe) or Availability(True))
    made("cpu", enabled=False, recipe="rounded")
    assert not asked


@pytest.mark.filterwarnings("ignore:.*experimental")  # once in a process
def test_a_backend_with_a_warning_does_not_displace_the_settings_of_others(hand_made, int8_kernels, engine):
    hand_made("xpu", availability=lambda: Availability(True, "experimental"))
    with autocast("cpu"):  # which chooses the engine
        pass
    settings = made("cpu", recipe="rounded")._settings
    for _ in range(20):
        autocast("xpu")
    assert (made("cpu", recipe="rounded")._settings is settings) is (engine == "native")


def test_the_name_of_a_recipe_may_get_another_class(backend, monkeypatch):
    def defined():
        class Mine(Rounded):
            kind = "mine"

        return Mine

    monkeypatch.setitem(kinds, "mine", None)  # to remove it
    for _ in range(2):
        mine = defined()
        assert type(made("cpu", recipe="mine")._settings.override.recipe) is mine
