"""The borders between the core and its plugins, which no name crosses.

A plugin imports what ``polycast`` exports, and the packages of the plugins that its manifest says it needs. The core
imports no plugin.
"""

import ast
from pathlib import Path

import pytest

from polycast.plugin import Plugin, manifests

SOURCES = Path(__file__).parent.parent
CORE, BACKENDS, PLUGINS = (
    SOURCES / folder for folder in ("core/polycast", "backends/polycast_backends", "plugins/polycast_plugins")
)
PUBLISHED = {"polycast", "polycast.plugin", "polycast.errors"}


def owner(path):
    """Return the plugin that a file is in, else "core"."""
    return path.relative_to(PLUGINS).parts[0] if path.is_relative_to(PLUGINS) else "core"


def file_of(module):
    """Return the file of a module of polycast or its plugins."""
    base = Path(*module.split("."))
    for root in (CORE.parent, PLUGINS.parent):
        for path in (root / base.with_suffix(".py"), root / base / "__init__.py"):
            if path.is_file():
                return path
    return None


def imports(path):
    """Return the module and the name of each thing that a file imports from polycast or its plugins."""
    root = next(root for root in (CORE.parent, PLUGINS.parent) if path.is_relative_to(root))
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        outer = package[: len(package) + 1 - node.level] if node.level else ()
        module = ".".join([*outer, *([node.module] if node.module else [])])
        for alias in node.names:
            inside = file_of(f"{module}.{alias.name}")
            if inside is not None:
                yield f"{module}.{alias.name}", ""
            elif file_of(module) is not None:
                yield module, alias.name


def published_for(path):
    """Return the modules that a file may import from outside its plugin, or the core."""
    here = owner(path)
    if here == "core":
        return set()
    manifest = next((each.plugin for each in manifests() if each.name == here), Plugin())
    needed = {f"polycast_plugins.{name}" for name in manifest.needs}
    if {file_of(command.partition(":")[0]) for command in manifest.commands.values()} & {path}:
        needed.add("polycast_plugins.cli")  # which alone imports the modules of commands
    return PUBLISHED | needed


def crossings():
    """Return a line for each name that crosses a border: who imports it, its module, and its name."""
    found = set()
    for path in [*CORE.rglob("*.py"), *PLUGINS.rglob("*.py")]:
        here = owner(path)
        published = published_for(path)
        for module, name in imports(path):
            if owner(file_of(module)) != here and module not in published:
                found.add(f"{here}: {module} {name}".rstrip())
    return sorted(found)


def test_no_name_crosses_the_borders():
    assert crossings() == []


def test_crossings_are_seen(monkeypatch):
    monkeypatch.setattr(f"{__name__}.PUBLISHED", {"polycast", "polycast.errors"})
    assert {"fastest: polycast.plugin Plugin", "quantize: polycast.plugin Plan"} <= {*crossings()}


def test_only_the_modules_of_commands_may_import_the_command_line():
    may = [
        name
        for name in ("run_command", "session")
        if "polycast_plugins.cli" in published_for(PLUGINS / f"dropin/{name}.py")
    ]
    assert may == ["run_command"]


def imported_modules(path):
    """Return the modules of polycast, and of its backends, that a file imports by name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("polycast"))
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.startswith("polycast"):
            yield node.module


@pytest.mark.parametrize("folder", [BACKENDS, SOURCES / "examples/polycast-npy/src"], ids=lambda path: path.name)
def test_backends_import_published_modules_and_their_own_package_only(folder):
    files = sorted(folder.rglob("*.py"))
    assert files
    own = {path: f"polycast_backends.{path.relative_to(folder).parts[0]}" for path in files if folder == BACKENDS}
    found = {
        f"{path.relative_to(folder)}: {module}"
        for path in files
        for module in imported_modules(path)
        if module not in (PUBLISHED if folder == BACKENDS else {*PUBLISHED, "polycast_plugins.quantize"})
        and not module.startswith(own.get(path, "polycast_npy"))
    }
    assert found == set()
