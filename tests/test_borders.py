"""The borders between the core and what is to become plugins of it: which names cross them.

``borders.txt`` lists the names that cross today. The list may only get shorter: a plugin imports what ``polycast``
exports, and the core imports no plugin. After a change that makes it shorter, run ``python tests/test_borders.py``.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "core" / "polycast"
ALLOWED = Path(__file__).parent / "borders.txt"
PLUGINS = {
    "cli": ("cli/",),
    "distributed": ("distributed.py",),
    "drop_in": ("drop_in/",),
    "fastest": ("engine/fastest/", "profiling/"),
    "integrations": ("integrations/",),
    "observer": ("observer/",),
    "out_dtype": ("out_dtype/",),
    "precision": ("precision/",),
    "testing": ("testing/",),
}
"""The files of each plugin to be."""


def plugin_of(path):
    """Return the plugin that a file of the core is to be in, given its path in the package; else "core"."""
    return next((name for name, places in PLUGINS.items() if path.startswith(places)), "core")


def imports(path):
    """Return the file and the name of each thing that a file imports from the package, as (path, name)."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ROOT.joinpath(*package[: len(package) + 1 - node.level], *(node.module or "").split("."))
            for alias in node.names:
                inside = base / f"{alias.name}.py"
                file = inside if inside.is_file() else base.with_suffix(".py")
                if not file.is_file():
                    file = base / "__init__.py"
                yield file.relative_to(ROOT).as_posix(), "" if file == inside else alias.name


def crossings():
    """Return a line for each name that crosses a border: who imports it, its module, and its name."""
    found = set()
    for path in ROOT.rglob("*.py"):
        here = plugin_of(path.relative_to(ROOT).as_posix())
        if path != ROOT / "__init__.py":
            for other, name in imports(path):
                if plugin_of(other) != here and not (other == "errors.py" and here != "core"):
                    found.add(f"{here}: {other.removesuffix('.py').replace('/', '.')} {name}".rstrip())
    return sorted(found)


def test_no_more_names_cross_the_borders_than_are_listed():
    allowed = ALLOWED.read_text(encoding="utf-8").splitlines()
    assert [line for line in crossings() if line not in allowed] == []


def test_the_list_has_no_name_that_crosses_no_border_any_more():
    found = crossings()
    assert [line for line in ALLOWED.read_text(encoding="utf-8").splitlines() if line not in found] == []


PUBLISHED = {"polycast", "polycast.plugin", "polycast.errors"}


def imported_modules(path):
    """Return the modules of polycast, and of its backends, that a file imports by name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("polycast"))
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.startswith("polycast"):
            yield node.module


@pytest.mark.parametrize("folder", ["backends", "examples/polycast-npy/src"])
def test_backends_import_published_modules_and_their_own_package_only(folder):
    folder = ROOT.parents[1] / folder
    files = sorted(folder.rglob("*.py"))
    assert files
    found = {
        f"{path.relative_to(folder)}: {module}"
        for path in files
        for module in imported_modules(path)
        if module not in PUBLISHED and module.partition(".")[0] != path.relative_to(folder).parts[0]
    }
    assert found == set()


if __name__ == "__main__":
    allowed = ALLOWED.read_text(encoding="utf-8").splitlines() if ALLOWED.exists() else crossings()
    ALLOWED.write_text("\n".join(line for line in crossings() if line in allowed) + "\n", encoding="utf-8")
