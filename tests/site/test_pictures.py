"""The pictures of the documentation are up to date and accessible."""

import importlib
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PICTURES = ["architecture.svg", "devices.svg", "report.svg", "speed.svg"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def module(monkeypatch):
    """Return a function that imports a module of docs/."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"docs.{name}")


def test_all_pictures_are_generated(module):
    assert sorted(module("pictures.draw").PICTURES) == sorted(path.name for path in DOCS.glob("*.svg")) == PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_up_to_date(module, name):
    assert (DOCS / name).read_text(encoding="utf-8") == str(module("pictures.draw").PICTURES[name]())


@pytest.mark.parametrize("name", PICTURES)
def test_picture_has_description_and_dark_colours(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    (title, description) = (root.find(f"{{http://www.w3.org/2000/svg}}{each}").text for each in ("title", "desc"))
    assert title
    assert len(description) > 40
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|href", text) == []


def test_readme_describes_the_current_figures(module):
    assert module("pictures.speed").described(README) == README
    assert re.search(r"!\[Time, where .*float32 \d\.\d\d.*\]\(docs/speed\.svg\)", README)


def test_pictures_of_readme_have_alternative_text():
    assert [target for words, target in re.findall(r"!\[(.*?)\]\((.*?)\)", README) if len(words) < 40] == []
    assert len(re.findall(r"!\[", README)) == 3


def test_readme_has_the_current_figures(module):
    assert module("readme_figures").updated(README) == README
    for name in ("region", "cache", "int8"):
        assert re.search(rf"<!-- figure of {name}: make docs -->\n.*\*\*\d\.\d\d\*\* of float32's time", README)


def test_readme_has_the_current_test_matrix(module):
    assert module("versions").updated(README) == README
    assert "| 2.11 | 3.10 |" in README


def test_readme_is_short():
    assert len(README.splitlines()) < 150


def test_readme_names_each_backend_in_the_table_of_devices():
    devices = README.partition("## Devices")[2].partition("##")[0]
    rows = [line for line in devices.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == {
        path.name
        for path in (ROOT / "backends/polycast_backends").iterdir()
        if path.name not in ("__pycache__", "generic")
    }


def test_words_that_people_search_for_are_in_the_readme():
    assert [word for word in ("GPU", "quantization", "int8", "mixed precision") if word not in README] == []
