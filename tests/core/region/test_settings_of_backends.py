"""Ask the backend again each time that a region is constructed.

Each region is made several times, since the native engine keeps the settings of the first.
"""

import functools

import pytest
import torch

import polycast
from polycast import autocast
from polycast.plugin import Availability
from polycast.policy.recipe_base import kinds

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


def test_a_device_is_asked_each_time_whether_it_is_available(backend, monkeypatch):
    assert made("cpu")._enabled
    assert made("cpu", enabled=False)._settings.enabled is False
    with monkeypatch.context() as changed:
        changed.setattr(backend, "availability", lambda: Availability(False, "unplugged"), raising=False)
        for _ in range(2):
            with pytest.warns(polycast.errors.AutocastDisabledWarning, match="unplugged"):
                assert not autocast("cpu")._enabled
        assert made("cpu", enabled=False)._settings.enabled is False
    assert made("cpu")._enabled


@pytest.mark.parametrize("answer", [SystemExit("no device"), RuntimeError("no device"), "no device", None])
def test_a_bad_answer_disables_the_region(backend, monkeypatch, answer):
    def bad():
        if isinstance(answer, BaseException):
            raise answer
        return answer

    made("cpu")
    monkeypatch.setattr(backend, "availability", bad, raising=False)
    with pytest.warns(
        polycast.errors.AutocastDisabledWarning, match="no device|expected a polycast.plugin.Availability"
    ):
        assert not autocast("cpu")._enabled


def test_an_interrupt_while_the_device_is_asked_is_raised(backend, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    made("cpu")
    monkeypatch.setattr(backend, "availability", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        autocast("cpu")


def test_a_backend_may_make_regions_while_it_is_asked(backend, monkeypatch):
    made("cpu")
    inside = []

    def asked():
        monkeypatch.undo()
        inside.append(made("cpu", torch.float16).fast_dtype)
        polycast.engine.state.machine.forget_actions()
        return Availability(True)

    monkeypatch.setattr(backend, "availability", asked, raising=False)
    assert made("cpu").fast_dtype is torch.bfloat16
    assert inside == [torch.float16]


def test_a_dtype_is_asked_for_each_time(backend, monkeypatch):
    assert made("cpu", torch.float16)._enabled
    monkeypatch.setattr(backend, "supported_dtypes", lambda: (torch.bfloat16,), raising=False)
    with pytest.warns(polycast.errors.AutocastDisabledWarning, match="target dtype is not supported"):
        assert not autocast("cpu", torch.float16)._enabled


def test_a_recipe_is_asked_for_each_time(backend, monkeypatch):
    monkeypatch.setattr(polycast.region.recipes, "_warned", set())
    assert made("cpu", recipe="int8")._settings.override.recipe == polycast.Int8()
    refusals = {"no int8": Availability(False, "no int8"), "experimental": Availability(True, "experimental")}
    for reason, answer in refusals.items():
        monkeypatch.setattr(backend, "recipe_availability", lambda recipe, answer=answer: answer)
        with pytest.warns(UserWarning, match=reason):
            autocast("cpu", recipe="int8")


def test_functions_with_the_decorator_of_a_backends_method_are_compiled(hand_made):
    def traced(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args)

        return wrapper

    hand_made("cpu", default_dtype=torch.bfloat16, availability=traced(lambda: Availability(True)))
    made("cpu")
    graphs = []
    compiled = torch.compile(traced(lambda x: x + 1), backend=lambda graph, _: graphs.append(graph) or graph.forward)
    assert compiled(torch.ones(1)).item() == 2
    assert len(graphs) == 1


def test_the_backend_of_a_region_that_is_disabled_is_not_asked_about_recipes(hand_made):
    asked = []
    hand_made("cpu", recipe_availability=lambda recipe: asked.append(recipe) or Availability(True))
    made("cpu", enabled=False, recipe="int8")
    assert not asked


def test_a_default_dtype_that_changes_is_that_of_later_regions(backend):
    assert made("cpu").fast_dtype is torch.bfloat16
    backend.default_dtype = torch.float16
    assert made("cpu").fast_dtype is torch.float16


def test_a_backend_with_a_warning_does_not_displace_the_settings_of_others(hand_made, named, engine):
    named(0.5)
    with autocast("cpu"):  # which chooses the engine
        settings = made("cpu", recipe="fastest")._settings
    hand_made("xpu", availability=lambda: Availability(True, "experimental"))
    for _ in range(20):
        autocast("xpu")
    assert (made("cpu", recipe="fastest")._settings is settings) is (engine == "native")


def test_the_name_of_a_recipe_may_get_another_class(backend, monkeypatch):
    def defined():
        class Mine(polycast.Int8):
            kind = "mine"

        return Mine

    monkeypatch.setitem(kinds, "mine", None)  # to remove it
    for _ in range(2):
        mine = defined()
        assert type(made("cpu", recipe="mine")._settings.override.recipe) is mine
