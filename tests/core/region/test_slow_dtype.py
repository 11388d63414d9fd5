"""SlowDtypeWarning: at the first region whose dtype the device emulates, once."""

import subprocess
import sys
import warnings

import pytest
import torch
from tests.core.rounding import Rounded

import polycast
from polycast.policy import manifests, recipe
from polycast.region import slow_dtype
from polycast.toolchain.load import BuildableLibrary


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Forget which dtypes regions have had in this process."""
    monkeypatch.setattr(slow_dtype, "_checked", set())
    polycast.plugin.refresh("cpu")
    yield
    polycast.plugin.refresh("cpu")


@pytest.fixture(autouse=True)
def know_better(monkeypatch):
    """Run without plugins that know slow dtypes, or recipes; return a function that adds such a plugin."""

    def know_better(*answers):
        functions = [manifests.PluginFunction("acme:why", each) for each in answers]
        monkeypatch.setattr(manifests, "functions", lambda table: functions)

    know_better()
    monkeypatch.setattr(recipe, "all_recipes", lambda: [Rounded()])
    return know_better


@pytest.fixture
def slow(hand_made):
    """Serve cpu by a backend that emulates bfloat16 and has no recipes."""
    emulated = {torch.bfloat16: "it has no such unit"}
    return hand_made("cpu", default_dtype=torch.bfloat16, slow_reason=emulated.get)


def warned(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [each for each in caught if each.category is polycast.errors.SlowDtypeWarning]


def test_first_region_says_why_and_what_to_do(slow):
    (found,) = warned(lambda: polycast.autocast("cpu"))
    assert str(found.message) == (
        "bfloat16 is slow on cpu: it has no such unit. It saves memory but no time. Faster: "
        "dtype=torch.float16, float32, without a region. "
        'To silence this: warnings.simplefilter("ignore", polycast.errors.SlowDtypeWarning).'
    )
    assert found.filename == __file__


def test_recipes_that_the_device_supports_are_named(slow):
    slow.recipe_availability = lambda recipe: polycast.plugin.Availability(True)
    (found,) = warned(lambda: polycast.autocast("cpu"))
    assert 'Faster: recipe="rounded" (inference only), dtype=torch.float16' in str(found.message)


def test_nothing_is_compiled_for_the_names(slow, monkeypatch):
    def recipe_availability(recipe):
        assert not recipe.needs_kernels  # others would compile
        return polycast.plugin.Availability(True)

    slow.ops_in_cpp, slow.recipe_availability = ("acme.native",), recipe_availability
    monkeypatch.setattr(BuildableLibrary, "is_built", lambda library: False)
    (found,) = warned(lambda: polycast.autocast("cpu"))
    assert "Faster: dtype=torch.float16" in str(found.message)


AGAIN = [
    *({}, {"dtype": torch.bfloat16}, {"cache_enabled": False}, {"cache": polycast.WeightCache()}),
    *({"policy": {"softmax": "fp32"}}, {"recipe": "none"}),
]


@pytest.mark.parametrize("again", AGAIN, ids=lambda arguments: "".join(arguments) or "plain")
def test_later_regions_do_not_warn(slow, again):
    assert len(warned(lambda: polycast.autocast("cpu", **again))) == 1
    assert warned(lambda: polycast.autocast("cpu", **again)) == []
    assert warned(lambda: polycast.autocast("cpu", cache=polycast.WeightCache())) == []


def test_each_dtype_warns_for_itself(slow):
    slow.slow_reason = lambda dtype: f"no {dtype}"
    assert len(warned(lambda: [polycast.autocast("cpu"), polycast.autocast("cpu", torch.float16)])) == 2


@pytest.mark.parametrize("slow_reason", [lambda dtype: 1 / 0, lambda dtype: True, lambda dtype: torch.ones(2)])
def test_errors_of_the_backend_are_ignored(slow, slow_reason):
    slow.slow_reason = slow_reason
    assert warned(lambda: polycast.autocast("cpu")) == []


@pytest.mark.parametrize("arguments", [{"enabled": False}, {"dtype": torch.float16}, {"recipe": "rounded"}], ids=str)
def test_other_regions_do_not_warn(slow, arguments):  # a recipe that is refused has another warning
    assert warned(lambda: polycast.autocast("cpu", **arguments)) == []
    assert len(warned(lambda: polycast.autocast("cpu"))) == 1


def test_region_with_a_recipe_does_not_warn(slow, engine):
    slow.recipe_availability = lambda recipe: polycast.plugin.Availability(True)

    def run():
        with polycast.autocast("cpu", recipe="rounded"), polycast.autocast("cpu", cache=polycast.WeightCache()):
            pass

    assert warned(run) == []
    assert len(warned(lambda: polycast.autocast("cpu"))) == 1


def test_plugins_may_say_more_or_that_a_dtype_is_not_slow(slow, know_better):
    for answers, said in [
        ([lambda *given: "{2} on {0} for {1}".format(*given)], "it has no such unit on cpu for torch.bfloat16"),
        ([lambda *given: "first", lambda device_type, dtype, reason: f"{reason}, second"], "first, second"),
        ([lambda *given: None], None),
    ]:
        know_better(*answers)
        found = polycast.plugin.find_slow_dtype(slow, torch.bfloat16)
        assert (found and found.reason) == said
    assert warned(lambda: polycast.autocast("cpu")) == []


def test_a_dtype_that_only_a_plugin_calls_slow_is_told_without_a_warning(hand_made, know_better):
    backend = hand_made("cpu", default_dtype=torch.bfloat16)
    know_better(lambda *args: "it is")
    assert warned(lambda: polycast.autocast("cpu")) == []
    assert str(polycast.plugin.find_slow_dtype(backend, torch.bfloat16)) == "bfloat16 is slow on cpu: it is"


def test_a_plugin_that_fails_is_left_out_with_a_warning(slow, know_better):
    know_better(lambda *args: 1 / 0)
    with pytest.warns(UserWarning, match=r"acme:why, of a plugin, failed: ZeroDivisionError"):
        assert polycast.plugin.find_slow_dtype(slow, torch.bfloat16).reason == "it has no such unit"


def test_warning_can_be_ignored_and_can_be_an_error(slow):
    with warnings.catch_warnings():
        warnings.simplefilter("error", polycast.errors.SlowDtypeWarning)
        for _ in range(2):  # each time, so that it does not depend on the order of tests
            with pytest.raises(polycast.errors.SlowDtypeWarning):
                polycast.autocast("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", polycast.errors.SlowDtypeWarning)
        polycast.autocast("cpu")
    assert warned(lambda: polycast.autocast("cpu")) == []


@pytest.mark.parametrize("category", [polycast.errors.SlowDtypeWarning, UserWarning, Warning])
def test_plugins_are_not_asked_for_a_warning_that_is_ignored(slow, know_better, category):
    asked = []
    know_better(lambda device_type, dtype, reason: asked.append(reason) or reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category)
        warnings.filterwarnings("ignore", "of another library")
        polycast.autocast("cpu")
    assert asked == []


@pytest.mark.parametrize("filters", [{"message": "float16"}, {"module": "acme"}])
def test_a_filter_of_other_warnings_ignores_none(slow, filters):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", **filters)
        polycast.autocast("cpu")
    assert len(caught) == 1


def test_region_in_compiled_code_warns(slow, engine):
    @torch.compile(backend="eager")
    def run(x):
        with polycast.autocast("cpu"):
            return x @ x

    (found,) = warned(lambda: run(torch.ones(2, 2)))
    assert found.filename == __file__
    torch._dynamo.reset()


PROGRAM = """
import warnings, torch, polycast

class Slow(type(polycast.plugin.get_backend("cpu"))):
    def slow_reason(self, dtype):
        return "it has no such unit"

polycast.plugin.register_backend(Slow())
with polycast.autocast("cpu"):
    pass
with polycast.autocast("cpu"):
    pass
"""


@pytest.mark.slow
def test_it_is_printed_once_by_default(monkeypatch):
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stderr.count("SlowDtypeWarning: bfloat16 is slow on cpu: it has no such unit") == 1
    assert done.stderr.startswith("<string>:9: ")
    ignoring = [sys.executable, "-W", "ignore:bfloat16 is slow", "-c", PROGRAM]
    assert subprocess.run(ignoring, capture_output=True, text=True, check=True).stderr == ""


def test_listeners_are_told_in_place_of_a_warning(slow):
    told = dict[str, torch.dtype]()
    events = polycast.plugin.events
    events.slow_dtype.add(told.__setitem__)
    try:
        assert warned(lambda: polycast.autocast("cpu")) == []
    finally:
        events.slow_dtype.remove(told.__setitem__)
    assert told == {"cpu": torch.bfloat16}
