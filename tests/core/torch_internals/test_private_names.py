"""Private names of torch: regions run without each."""

import json
import os
from pathlib import Path

import pytest

import polycast
from polycast.engine import installation
from polycast.torch_internals import callers_state, lookup, private_names

assert private_names  # its names are looked up, and
assert callers_state  # so are these

LACKING = Path(__file__).with_name("lacking.py")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is forked for each name")
@pytest.mark.parametrize("chosen", ["native", "reference"])
def test_regions_run_without_each_name_and_warn_once_of_the_loss(chosen, run_program):
    script = f"import runpy; runpy.run_path({str(LACKING)!r}, run_name='__main__')"
    status, printed, errors = run_program(script, chosen, imports="torch, torch._dynamo")
    assert status == 0, errors
    answers = json.loads(printed)
    assert len(answers) > 50
    assert answers.keys() <= lookup.losses.keys()  # which may have names that plugins look up
    assert {name: answer["error"] for name, answer in answers.items() if answer["error"]} == {}
    lacks = "lacks internals that polycast reads (without {}: {}"
    without_warning = {
        name: answer["warnings"]
        for name, answer in answers.items()
        if [
            lacks.format(name, lookup.losses[name].partition("; ")[0]) in said
            for said in answer["warnings"]
            if "is slow on" not in said
        ]
        != [True]
    }
    assert without_warning == {}


def test_missing_names_are_warned_about_once_when_the_first_engine_is_chosen(monkeypatch):
    monkeypatch.setattr(lookup, "missing", {"torch._a": "this is lost", "torch._b": "and that"})
    monkeypatch.setattr(lookup, "_warned", False)
    text = r"This torch .* lacks .* \(without torch._a: this is lost; without torch._b: and that\). Regions work."
    installation.forget_choice()
    with pytest.warns(UserWarning, match=text) as said, polycast.autocast("cpu"):
        pass
    installation.forget_choice()
    with polycast.autocast("cpu"):
        pass
    assert [warning.filename for warning in said if "is slow on" not in str(warning.message)] == [__file__]


def test_a_name_of_a_later_torch_is_not_lacking(monkeypatch):
    monkeypatch.setattr(lookup, "losses", {})
    monkeypatch.setattr(lookup, "missing", {})
    monkeypatch.setattr(lookup, "_VERSION", (2, 11))
    assert lookup.torch_name("torch._new", "older", "this is lost", since=(2, 12)) == "older"
    assert lookup.missing == {}
    monkeypatch.setattr(lookup, "_VERSION", (2, 12))
    assert lookup.torch_name("torch._new", "older", "this is lost", since=(2, 12)) == "older"
    assert lookup.missing == {"torch._new": "this is lost"}


def test_this_torch_lacks_nothing():
    assert lookup.missing == {}


def test_names_are_private_and_their_losses_are_sentences():
    assert [name for name in lookup.losses if not any(part.startswith("_") for part in name.split("."))] == []
    assert [name for name, loss in lookup.losses.items() if len(loss.split()) <= 2] == []
