"""docs/architecture.md and docs/modules.md name modules and functions that exist."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CORE = ROOT / "core" / "polycast"
PLUGINS = ROOT / "plugins" / "polycast_plugins"
SOURCES = [
    path
    for source in ("core", "backends", "plugins")
    for path in (ROOT / source).rglob("*")
    if path.suffix in (".py", ".h", ".cpp")
]


def resolved(name):
    """Return a path that the page names: one in the core or the plugins, or one in the repository."""
    return next((folder / name for folder in (CORE, PLUGINS, ROOT) if (folder / name).exists()), None)


def test_paths_exist():
    assert [name for name in re.findall(r"`([\w/]+/[\w/.]*)`", PAGE) if resolved(name) is None] == []


def test_names_are_in_their_files():
    named = set(re.findall(r"`([\w/]+\.(?:py|h|cpp))` `(\w+)`", PAGE))
    texts = {name: resolved(name).read_text(encoding="utf-8") for name, _ in named}
    assert [(name, inside) for name, inside in named if not re.search(rf"\b{inside}\b", texts[name])] == []


def test_names_are_in_the_sources():
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    names = set(re.findall(r"`(\w+)`", PAGE)) - {"mm", "softmax", "linear", "weight", "x", "operator"}
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text) and resolved(name) is None] == []


def test_layers_are_in_order():
    layers = runpy.run_path(str(ROOT / "tests" / "test_layers.py"))["LAYERS"]
    table = PAGE.partition("| layer |")[2].partition("\n\n")[0]
    rows = [set(re.findall(r"`(\w+)`", row.split("|")[1])) for row in table.splitlines()[2:]]
    assert rows == layers


def test_table_of_modules_is_up_to_date(module):
    modules = module("modules")
    assert modules.PAGE.read_text(encoding="utf-8") == modules.page(), "run `python -m docs`"
