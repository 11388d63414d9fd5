"""The logger "polycast": what is found and chosen is logged once, below WARNING."""

import importlib.metadata
import logging

import pytest
import torch

import polycast
from polycast.engine import choice, installation
from polycast.plugin import Availability
from polycast.registry.registry import registry
from polycast.toolchain import load
from polycast.toolchain.cpp_library import BuildError

OWN = f"polycast {importlib.metadata.version('polycast')}"
COLLECT = """
import logging, warnings

class Collect(logging.Handler):
    def emit(self, record):
        records.append((record.levelname, record.getMessage()))

records = []
logging.getLogger("polycast").addHandler(Collect())
logging.getLogger("polycast").setLevel("DEBUG")
"""
TWO_REGIONS = """
with polycast.autocast("cpu"):
    first = records.copy()
with polycast.autocast("cpu"):
    answer = [first, records[len(first):]]
"""
USE_IN_HANDLER = """
import threading
from polycast.registry.registry import registry

def take():
    for each in (registry, registry._discovered.loaders["cpu"], registry._discovered.extensions.get("cpu")):
        if each is not None:
            is_free = each._lock.acquire(timeout=10)
            records.append(is_free)
            each._lock.release()

def emit(self, record):
    thread = threading.Thread(target=take)
    thread.start()
    thread.join()

Collect.emit = emit
polycast.plugin.get_backend("cpu")
answer = records
"""


def test_importing_polycast_adds_no_handler_that_writes():
    assert [type(each) for each in logging.getLogger("polycast").handlers] == [logging.NullHandler]
    assert logging.getLogger("polycast").level == logging.NOTSET


def test_the_first_region_logs_what_is_offered_and_chosen_and_the_second_nothing(run, plugin):
    plugin("acme-cpu", "cpu")
    answer = run(COLLECT + TWO_REGIONS, POLYCAST_BLOCK="xpu")
    first, second = ([tuple(record) for record in records] for records in answer)
    assert second == []
    built_in = f"{OWN} (polycast_backends.cpu)"
    assert ("DEBUG", f"cpu: offered in polycast.backends by {built_in}") in first
    assert ("DEBUG", "cpu: offered in polycast.backends by acme-cpu 1.0 (acme_cpu)") in first
    assert [record for record in first if record[0] != "DEBUG" and "extension" not in record[1]] == [
        ("INFO", "xpu: POLYCAST_BLOCK switches its backend off"),
        ("INFO", "cpu: backend: acme-cpu 1.0 (acme_cpu)"),
        ("INFO", f"cpu: passed over: {built_in}"),
        ("INFO", "the engine is reference: by POLYCAST_ENGINE"),
    ]


def test_an_extension_that_cannot_be_used_is_logged_with_the_reason(run, extension):
    extension(
        "acme-more", amendment="AcmeExtension.availability = lambda self: polycast.plugin.Availability(False, 'no box')"
    )
    answer = run(COLLECT + "polycast.plugin.get_backend('cpu'); answer = records")
    assert ["INFO", "cpu: extension: acme-more 1.0 (acme_more) cannot be used: no box"] in answer


def test_packages_that_a_refresh_finds_are_logged(run, plugin):
    plugin("acme-xpu", "xpu")
    answer = run(COLLECT + "polycast.backends(); records.clear(); polycast.backends(refresh=True); answer = records")
    assert ["DEBUG", "xpu: offered in polycast.backends by acme-xpu 1.0 (acme_xpu)"] in answer


def test_handlers_are_called_without_a_lock_of_the_registry(run):
    assert set(run(COLLECT + USE_IN_HANDLER)) == {True}


def test_the_engine_is_logged_with_its_origin(engine, logged):
    origin = polycast.plugin.choose_engine().origin
    assert logged.take() == [("INFO", f"the engine is {engine}: {origin or 'by POLYCAST_ENGINE'}")]
    polycast.plugin.choose_engine()
    assert logged.take() == []


def test_an_engine_that_cannot_be_built_is_logged_with_the_reason(logged, monkeypatch):
    installation.forget_choice()
    monkeypatch.setenv("POLYCAST_ENGINE", "auto")
    monkeypatch.setattr(load, "try_build", lambda _: BuildError("no compiler."))
    assert choice.choose_engine().name == "reference"
    installation.forget_choice()
    assert logged.take() == [("INFO", "the engine is reference: no compiler.")]


def test_a_backend_by_hand_is_logged(hand_made, logged):
    backend = hand_made("xpu", default_dtype=torch.bfloat16)
    assert logged.take()[-1] == ("INFO", f"xpu: backend: {type(backend).__module__}.HandMade, by hand")


def test_why_regions_are_disabled_is_logged_once(engine, hand_made, logged):
    hand_made("xpu", default_dtype=torch.bfloat16, availability=lambda: Availability(False, "unplugged"))
    polycast.plugin.choose_engine()
    logged.take()
    for _ in range(2):
        with pytest.warns(polycast.errors.AutocastDisabledWarning):
            polycast.autocast("xpu")
    text = "xpu: regions are disabled: xpu is not available: unplugged. Disabling autocast."
    assert logged.take() == [("INFO", text)]


def test_why_regions_run_without_a_recipe_is_logged_once(engine, other_cpu, logged):
    polycast.plugin.choose_engine()
    recipe = next((each for each in polycast.plugin.all_recipes() if each.needs_kernels), None)
    if recipe is None:
        pytest.skip("no recipe is installed")
    other_cpu(recipe_availability=lambda recipe: Availability(False, "no kernels"))
    logged.take()
    for _ in range(2):
        with pytest.warns(polycast.errors.RecipeDisabledWarning):
            polycast.autocast("cpu", recipe=recipe)
    assert logged.take() == [("INFO", f"cpu: regions run without the recipe {recipe.kind}: no kernels")]


def test_regions_log_nothing_once_the_device_is_in_use(engine, logged):
    polycast.install("cpu")
    logged.take()
    for settings in 3 * [{"policy": {"softmax": "lower_precision_fp"}}, {"enabled": False}]:
        with polycast.autocast("cpu", **settings):
            torch.ones(2, 2) @ torch.ones(2, 2)
    assert logged.take() == []


def test_the_packages_in_use_are_those_of_devices_with_kernels(engine, hand_made, monkeypatch):
    monkeypatch.setattr(registry, "used", set())
    hand_made("xpu", default_dtype=torch.bfloat16)
    polycast.install("cpu")
    packages = polycast.backends().in_use()
    assert packages["cpu"][0] == OWN
    assert "xpu" not in packages
    polycast.install("xpu")
    assert polycast.backends().in_use()["xpu"] == ["by hand"]
