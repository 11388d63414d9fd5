"""Examples in the documentation run and print what their comments say; links and tables are complete."""

import contextlib
import doctest
import importlib
import importlib.metadata
import importlib.util
import io
import pkgutil
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import polycast
from polycast.common import env

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
ENVIRONMENT = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")


class Block(NamedTuple):
    """A code block of a page; `line` is the number of its first line."""

    page: Path
    line: int
    code: str

    def __str__(self):
        return f"{self.page.name}:{self.line}"

    def output(self, names):
        """Run the block with the globals `names`; return the lines printed, and the name of its last exception."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            try:
                exec(compile("\n" * (self.line - 1) + self.code, self.page, "exec"), names)
            except Exception as error:
                if type(error).__name__ not in self.code:
                    raise
                print(type(error).__name__)
        return out.getvalue().splitlines()

    def comments(self):
        """Return the comments at the ends of its lines."""
        return re.findall(r"\S  # (.+)$", self.code, re.MULTILINE)


def blocks(language):
    """Return the blocks of a language; a Python block without imports continues the block before it."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start(1)) + 1
            goes_on = not re.search(r"^(import|from) |\bamp\.", match[1], re.MULTILINE)
            if language == "python" and goes_on:
                first = found.pop()
                gap = "\n" * (line - first.line - first.code.count("\n"))
                found.append(Block(page, first.line, first.code + gap + match[1]))
            else:
                found.append(Block(page, line, match[1]))
    return found


def on_both(block):
    """Return whether a block compares the two libraries: it uses `amp` without defining it."""
    return "amp." in block.code.replace("torch.amp.", "")


def examples():
    for package in ("polycast", "polycast_backends", "polycast_plugins"):
        path = importlib.import_module(package).__path__
        for name in [package, *(info.name for info in pkgutil.walk_packages(path, package + "."))]:
            has_no_triton = name.endswith("_triton") and importlib.util.find_spec("triton") is None
            if not name.endswith("__main__") and not has_no_triton:
                found = doctest.DocTestFinder().find(importlib.import_module(name), name)
                yield from (example for example in found if example.examples)


@pytest.fixture(scope="module")
def in_shared_thread():
    """Return a function that calls another in a thread shared by all examples.

    torch 2.11 crashes if a thread compiles after another one that compiled has ended.
    """
    with ThreadPoolExecutor(1) as thread:

        def call(function):
            result = thread.submit(function).result()
            assert thread.submit(torch._C._is_any_autocast_enabled).result() is False
            return result

        yield call


@pytest.mark.parametrize("block", [block for block in blocks("python") if not on_both(block)], ids=str)
def test_example_prints_what_its_comments_say(block, in_shared_thread, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the files that it writes
    assert in_shared_thread(lambda: block.output({})) == block.comments()


@pytest.mark.parametrize("library", ["torch", "polycast"])
@pytest.mark.parametrize("block", [block for block in blocks("python") if on_both(block)], ids=str)
def test_comparison_prints_what_its_comments_say_for_each_library(block, library, in_thread):
    expected = [dict(re.findall(r"(\w+): (.+?)(?:, (?=polycast: )|$)", comment)) for comment in block.comments()]
    if "xpu" in block.code and torch.xpu.is_available():
        pytest.skip("there is an XPU here")
    polycast.uninstall()  # torch is to run its own kernels
    names = {"torch": torch, "amp": {"torch": torch.amp, "polycast": polycast}[library]}
    assert in_thread(lambda: block.output(names)) == [by[library] for by in expected if library in by]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is new in Python 3.11")
def test_toml_examples_are_valid():
    import tomllib

    for block in blocks("toml"):
        assert tomllib.loads(block.code), block


@pytest.mark.parametrize("example", list(examples()), ids=lambda example: example.name)
def test_docstring_example_prints_what_it_says(example):
    report = io.StringIO()
    doctest.DocTestRunner().run(example, out=report.write)
    assert report.getvalue() == ""


def test_each_environment_variable_has_a_row():
    variables = set(re.findall(r"POLYCAST_[A-Z]+", Path(env.__file__).read_text(encoding="utf-8")))
    assert {name for name in variables if f"| `{name}` |" not in ENVIRONMENT} == set()


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_have_targets():
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            other = page.parent / name if name else page
            if not other.exists() or (anchor and anchor not in anchors(other)):
                broken.append((page.name, target))
    assert broken == []


def test_the_first_release_has_nothing_to_change_or_fix():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first = text.partition("\n## 0.1.0")[2].partition("\n## ")[0]
    assert re.findall(r"^### (.+)$", first, re.MULTILINE) == ["Added"]


@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_programs_that_a_page_runs_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    programs = re.findall(r"^    (?:polycast run|python) (?:-\S+ )*(\S+\.py)", text, re.MULTILINE)
    assert [program for program in programs if not (ROOT / program).is_file()] == []
    assert programs or page != "docs/start.md"


def test_paths_in_pages_exist():
    path = r"`((?:core|backends|benchmarks|docs|examples)/[\w./-]+)`"
    paths = [(page.name, each) for page in PAGES for each in re.findall(path, page.read_text(encoding="utf-8"))]
    assert [each for each in paths if not (ROOT / each[1]).exists()] == []
