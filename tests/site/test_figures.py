"""The data of the pictures has the structure that the program writes now."""

import importlib
import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
FIGURES = ROOT / "docs" / "figures"
STALE = "the structure of {} is out of date: run `python -m docs.figures` and `python -m docs`"


@pytest.fixture(scope="module")
def figures():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        patch.chdir(ROOT)
        yield importlib.import_module("docs.figures.__main__")


@pytest.fixture(scope="module", params=["devices.json", "observation.json"])
def figure(request, figures):
    """Return a figure's name, its data from a new run, and its saved data."""
    with torch.random.fork_rng():
        made = figures.FIGURES[request.param]()
    return request.param, json.loads(made), json.loads((FIGURES / request.param).read_text(encoding="utf-8"))


CPU_DEPENDENT = ("run", "emulated")
"""Keys whose values depend on the processor."""


def form(value, place=()):
    """Return the kinds of values at each place; all elements of a list share one place."""
    if isinstance(value, dict):
        found, inner = {place: {"object"}}, value.items()
    elif isinstance(value, list):
        found, inner = {place: {"list"}}, (("[]", each) for each in value)
    else:
        kind = "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__
        found, inner = {place: {kind}}, ()
    for key, each in inner:
        for where, kinds in form(each, (*place, key)).items():
            found.setdefault(where, set()).update(kinds)
    return found


def differences(one, other):
    """Return the places where two values differ in structure; an empty list and null match anything."""
    one, other = form(one), form(other)
    keys = {
        place
        for place in one.keys() ^ other.keys()
        if place[-1] != "[]" and place[:-1] in one.keys() & other.keys() and place[:-1] != CPU_DEPENDENT
    }
    pairs = {place: (one[place] - {"NoneType"}, other[place] - {"NoneType"}) for place in one.keys() & other.keys()}
    return sorted(keys | {place for place, (mine, its) in pairs.items() if mine and its and mine != its})


@pytest.mark.slow
def test_saved_figure_has_the_current_structure(figure):
    name, made, saved = figure
    assert differences(made, saved) == [], STALE.format(name)


@pytest.mark.parametrize(
    ("saved", "where"),
    [
        ({"run": {"engine": "native", "runs": 1}, "ops": [{"op": "mm", "calls": 2}]}, []),
        ({"run": {"engine": None, "runs": 1.5}, "ops": []}, []),
        ({"run": {"engine": "native"}, "ops": []}, [("run", "runs")]),
        ({"run": {"engine": "native", "runs": "1"}, "ops": []}, [("run", "runs")]),
        (
            {"run": {"engine": "native", "runs": 1}, "ops": [{"op": "mm", "count": 2}]},
            [("ops", "[]", "calls"), ("ops", "[]", "count")],
        ),
        ({"run": {"engine": "native", "runs": 1}}, [("ops",)]),
    ],
)
def test_differences_finds_changed_structure(saved, where):
    actual = {"run": {"engine": "reference", "runs": 2}, "ops": [{"op": "mm", "calls": 2}, {"op": "addmm", "calls": 1}]}
    assert differences(actual, saved) == where


@pytest.fixture
def write(figures, monkeypatch, tmp_path):
    """Return a function that writes two figures, the second with a text, and returns the files by name."""

    def write(text):
        monkeypatch.setattr(figures, "FOLDER", tmp_path)
        monkeypatch.setattr(figures, "FIGURES", {"one.json": lambda: "[1]\n", "other.json": lambda: text})
        figures.main()

    return write


def test_main_writes_all_figures(write, tmp_path):
    write("[2]\n")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"one.json": "[1]\n", "other.json": "[2]\n"}


@pytest.mark.parametrize("path", ["/home/somebody/model.py:3", "C:\\\\Users\\\\model.py"])
def test_figure_with_machine_path_is_refused(write, path, tmp_path):
    expected = r"^other\.json contains a path of this machine: .* Run it in the repository's"
    with pytest.raises(ValueError, match=expected):
        write(f'["at {path}"]\n')
    assert list(tmp_path.iterdir()) == []


def test_saved_figures_have_no_machine_path(figures):
    texts = {path.name: path.read_text(encoding="utf-8") for path in FIGURES.glob("*.json")}
    assert {name: figures.checked(name, text) for name, text in texts.items()} == texts
