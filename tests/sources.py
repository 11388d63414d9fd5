"""The sources of the core, the backends and the plugins, parsed, and what they import from each other."""

import ast
import functools
import importlib.metadata
from pathlib import Path

SOURCES = Path(__file__).parent.parent
CORE, BACKENDS, PLUGINS = (
    SOURCES / folder for folder in ("core/polycast", "backends/polycast_backends", "plugins/polycast_plugins")
)
BUILT_INS = sorted(
    importlib.metadata.distribution("polycast").entry_points.select(group="polycast.backends").names - {"generic"}
)
"""The devices that polycast has a backend for."""


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def file_of(module):
    """Return the file of a module of polycast or its plugins."""
    base = Path(*module.split("."))
    for root in (CORE.parent, PLUGINS.parent):
        for path in (root / base.with_suffix(".py"), root / base / "__init__.py"):
            if path.is_file():
                return path
    return None


def imports(path):
    """Return the module and the name of each thing that a file imports from polycast or its plugins, anywhere in it."""
    root = next(root for root in (CORE.parent, PLUGINS.parent) if path.is_relative_to(root))
    package = path.relative_to(root).parent.parts
    for node in ast.walk(parsed(path)):
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
