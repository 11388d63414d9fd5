"""The regions that torch's name makes while torch is patched: their attributes, and the lines of their warnings."""

import copy
import pickle
import warnings

import pytest
import torch

import polycast
from polycast.engine import installation
from polycast.policy import manifests
from polycast.region import slow_dtype

X = torch.ones(2, 2)


def test_a_region_of_patched_torch_can_be_set(engine):
    with polycast.patch_torch():
        region = torch.autocast("cpu")
        region.fast_dtype = torch.float16
        with region:
            assert (X @ X).dtype is torch.float16


def test_copies_have_the_attributes_of_a_program(engine):
    with polycast.patch_torch():
        region = torch.autocast("cpu")
        region.note = ["of the program"]
        for copied in (copy.copy(region), copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
            assert vars(copied).keys() == vars(region).keys()
            assert copied.note == region.note
        assert copy.deepcopy(region).note is not region.note


@pytest.fixture
def emulated(hand_made, monkeypatch):
    """Serve cpu by a backend that emulates bfloat16; forget which dtypes regions have had in this process."""
    monkeypatch.setattr(slow_dtype, "_checked", set())
    monkeypatch.setattr(manifests, "functions", lambda table: [])
    hand_made("cpu", default_dtype=torch.bfloat16, slow_reason=lambda dtype: "it has no such unit")
    polycast.plugin.refresh("cpu")
    yield
    polycast.plugin.refresh("cpu")


def test_a_region_with_a_slow_dtype_warns_at_the_line_of_the_program(emulated):
    with polycast.patch_torch(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.autocast("cpu")
        torch.autocast("cpu", cache_enabled=False)
    (found,) = [each for each in caught if each.category is polycast.errors.SlowDtypeWarning]
    assert found.filename == __file__


def test_the_warning_of_the_reference_engine_names_the_users_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("POLYCAST_ENGINE", "auto")
    installation.forget_choice()

    def enter():
        with polycast.patch_torch(), torch.autocast("cpu"):
            pass

    with pytest.warns(UserWarning, match="runs on its reference engine") as caught:
        enter()
    installation.forget_choice()
    first, last = enter.__code__.co_firstlineno, max(line for *_, line in enter.__code__.co_lines() if line)
    assert caught[0].filename == __file__
    assert first < caught[0].lineno <= last
