"""The site is complete, and a faulty page stops its build."""

import html
import re
import runpy
import shutil
import zlib
from pathlib import Path

import pytest
from typer.main import get_command

import polycast
from polycast_plugins.cli import app

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parent.parent.parent / "docs"
REFERENCE = DOCS / "reference"


@pytest.fixture(scope="module")
def broken(build, tmp_path_factory):
    """Return the output of a build of a small site, with the settings of the real one and one fault of each kind."""
    folder = tmp_path_factory.mktemp("broken")
    pages = folder / "docs"
    (pages / "pictures").mkdir(parents=True)
    for name in ("conf.py", "pictures/favicon.svg"):
        shutil.copy(DOCS / name, pages / name)
    shutil.copytree(DOCS / "_static", pages / "_static")
    (pages / "index.md").write_text("# Home\n\n```{toctree}\npage\nother\n```\n", encoding="utf-8")
    (pages / "other.md").write_text("# Another page\n\n[the first](page.md)\n", encoding="utf-8")
    with (pages / "page.md").open("w", encoding="utf-8") as page:
        page.write(
            "# A page\n\n[a page](no-such-page.md), [a place](other.md#no-such-place), [a file](../no-such-file.py)\n"
        )
        page.write("\n![a picture](no-such-picture.svg)\n\n```{eval-rst}\n:func:`polycast.no_such_name`\n```\n")
    (pages / "forgotten.md").write_text("# A page that no other leads to\n", encoding="utf-8")
    done = build(pages, folder / "site")
    assert done.returncode != 0
    return done.stdout


PAGES, FILES = ("no-such-page.md", "no-such-place", "forgotten.md"), ("no-such-file.py", "no-such-picture.svg")


def test_the_faults_and_nothing_else_stop_the_build(broken):
    warnings = [line for line in broken.splitlines() if "WARNING" in line]
    faults = [*PAGES, *FILES, "polycast.no_such_name"]
    assert [fault for fault in faults if not any(fault in line for line in warnings)] == []
    assert len(warnings) == len(faults), broken


def documented(site):
    """Return the names in the site's inventory."""
    lines = (site / "objects.inv").read_bytes().split(b"\n", 4)
    return {line.split()[0] for line in zlib.decompress(lines[4]).decode().splitlines()}


def test_public_names_are_in_the_reference(site):
    modules = (polycast, polycast.plugin, polycast.errors)
    names = {f"{module.__name__}.{name}" for module in modules for name in module.__all__}
    names |= {f"polycast_plugins.distributed.{name}" for name in ("fully_shard", "MixedPrecision")}
    assert names - {"polycast.plugin.CastPolicy"} - documented(site) == set()  # it is in polycast too


def test_reference_index_lists_all_public_names():
    text = (REFERENCE / "index.md").read_text(encoding="utf-8")
    names = [*polycast.__all__, *polycast.plugin.__all__, *polycast.errors.__all__]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_commands_and_their_options_are_in_the_reference():
    text, missing = (REFERENCE / "command-line.md").read_text(encoding="utf-8"), []
    for name, command in get_command(app).commands.items():
        synopsis = "".join(line for line in text.splitlines() if f"{line} ".startswith(f"    polycast {name} "))
        options = [max(each.opts, key=len) for each in command.params if each.opts[0][0] == "-"]
        missing += [(name, option) for option in (name, *options) if option not in synopsis]
    assert missing == []


def test_the_home_page_has_the_install_line_and_the_examples_of_the_readme(site):
    page = html.unescape(re.sub("<[^>]+>", "", (site / "index.html").read_text(encoding="utf-8")))
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert 'pip install ".[all]"' in page
    assert len(examples) == 3
    assert [example for example in examples if example.strip() not in page] == []


@pytest.mark.parametrize("name", ["somebody/polycast", ""])
def test_the_home_page_links_the_repository_that_builds_it(monkeypatch, name):
    monkeypatch.setenv("GITHUB_REPOSITORY", name)
    monkeypatch.delenv("GITHUB_SERVER_URL", raising=False)
    settings = runpy.run_path(str(DOCS / "conf.py"))
    link = settings["myst_substitutions"]["repository"]
    assert link == ("· [Repository](https://github.com/somebody/polycast)" if name else "")
    assert bool(settings["html_theme_options"]) == bool(name)
    assert "{{ repository }}" in (DOCS / "index.md").read_text(encoding="utf-8")


def test_each_page_is_built(site):
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert {page.as_posix() for page in pages if not (site / page).is_file()} == set()
