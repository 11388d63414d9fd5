"""The pictures of the documentation: that they are of the figures that are kept, and readable by all."""

import importlib
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PICTURES = ["architecture.svg", "devices.svg", "report.svg", "rooms.svg", "speed.svg"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def made(monkeypatch):
    """Return a function that imports a module of docs."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"docs.{name}")


def test_the_pictures_are_all(made):
    assert sorted(made("pictures.__main__").PICTURES) == sorted(path.name for path in DOCS.glob("*.svg")) == PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_the_one_that_is_made_of_the_figures(made, name):
    assert (DOCS / name).read_text(encoding="utf-8") == str(made("pictures.__main__").PICTURES[name]())


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_says_what_it_shows_in_words_and_has_colours_for_the_dark(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    (title, description) = (root.find(f"{{http://www.w3.org/2000/svg}}{each}").text for each in ("title", "desc"))
    assert title
    assert len(description) > 40
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|href", text) == []


def test_the_readme_says_in_words_what_the_figures_are(made):
    assert made("pictures.speed").described(README) == README
    assert re.search(r"!\[Time, where .*float32 \d\.\d\d.*\]\(docs/speed\.svg\)", README)


def test_the_readmes_pictures_have_words():
    assert [target for words, target in re.findall(r"!\[(.*?)\]\((.*?)\)", README) if len(words) < 40] == []
    assert len(re.findall(r"!\[", README)) == 3


def test_the_readmes_table_is_that_of_the_matrix(made):
    assert made("versions").updated(README) == README
    assert "| 2.11 | 3.10 |" in README


def test_the_readme_is_one_page():
    assert len(README.splitlines()) < 110
