"""The borders between the core and its plugins, which no name crosses.

A plugin imports what ``polycast`` exports, and the packages of the plugins that its manifest says it needs. The core
imports no plugin.
"""

import ast

import pytest

from polycast.plugin import Plugin, manifests

from .sources import BACKENDS, CORE, PLUGINS, SOURCES, file_of, imports, parsed

PUBLISHED = {"polycast", "polycast.plugin", "polycast.errors"}


def owner(path):
    """Return the plugin that a file is in, else "core"."""
    return path.relative_to(PLUGINS).parts[0] if path.is_relative_to(PLUGINS) else "core"


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
    for node in ast.walk(parsed(path)):
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
