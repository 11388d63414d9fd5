"""Ask the backend, when a region is constructed: once if it affirms, and again after `refresh`.

Each region is made several times, since the native engine keeps the settings of the first.
"""

from collections.abc import Sequence

import pytest
import torch
from tests.core.rounding import Rounded

import polycast
from polycast import autocast
from polycast.plugin import Availability, Recipe, refresh
from polycast.policy.recipe import kinds

from .made_region import made

pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture
def backend(hand_made):
    return hand_made("cpu", default_dtype=torch.bfloat16, recipe_availability=lambda recipe: Availability(True))


def test_a_backend_that_is_registered_serves_the_next_region(hand_made):
    assert made("cpu").fast_dtype is torch.bfloat16
    hand_made("cpu", default_dtype=torch.float16)
    assert made("cpu").fast_dtype is torch.float16
    polycast.plugin.unregister_backend("cpu")
    assert made("cpu").fast_dtype is torch.bfloat16


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
        ((), "availability", Availability(False, "unplugged"), "unplugged"),
        ((torch.float16,), "supported_dtypes", (torch.bfloat16,), "target dtype is not supported"),
    ],
    ids=["device", "dtype"],
)
def test_refresh_asks_again_whether_the_device_and_the_dtype_can_be_used(
    backend, monkeypatch, arguments, asked, answer, reason
):
    assert made("cpu", *arguments)._enabled
    monkeypatch.setattr(backend, asked, lambda: answer, raising=False)
    assert made("cpu", *arguments)._enabled
    refresh("cpu")
    with pytest.warns(polycast.errors.AutocastDisabledWarning, match=reason):
        assert not autocast("cpu", *arguments)._enabled


def test_refresh_asks_again_for_a_recipe(backend, monkeypatch):
    monkeypatch.setattr("polycast.region.resolve._said", set())
    assert made("cpu", recipe="rounded")._settings.override.recipe == Rounded()
    refusals = {"no int8": Availability(False, "no int8"), "experimental": Availability(True, "experimental")}
    for reason, answer in refusals.items():
        monkeypatch.setattr(backend, "recipe_availability", lambda recipe, answer=answer: answer)
        refresh("cpu")
        with pytest.warns(UserWarning, match=reason):
            autocast("cpu", recipe="rounded")


def test_refresh_reads_the_default_dtype_again(backend):
    assert made("cpu").fast_dtype is torch.bfloat16
    backend.default_dtype = torch.float16
    refresh("cpu")
    assert made("cpu").fast_dtype is torch.float16


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


@pytest.mark.parametrize("device_type", ["cpu:0", "meta"])
def test_a_device_is_refreshed_by_any_device_string(device_type):
    refresh(device_type)


def test_refresh_refuses_what_torch_does_not_know():
    with pytest.raises(RuntimeError, match="Invalid device string: 'hpuu'"):
        refresh("hpuu")


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
