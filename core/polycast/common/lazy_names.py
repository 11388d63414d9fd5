"""Names of a module that are imported when they are first used: those that its stub, the ``.pyi`` file, imports."""

import ast
import gc
import importlib
import sys
from collections.abc import Callable
from typing import Any


def places(module: str) -> dict[str, str]:
    """Return what the stub of a module imports as public: the module of each name, relative ones with their dots."""
    spec: Any = sys.modules[module].__spec__
    path = f"{spec.origin.removesuffix('c')}i"  # without sources, the module is a .pyc file
    try:
        stub = ast.parse(spec.loader.get_data(path))
    except OSError as error:
        raise ImportError(
            f"The stub of {module}, {path}, cannot be read: install the .pyi files of the package too, as data."
        ) from error
    return {
        alias.name: "." * node.level + node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
        if alias.asname == alias.name
    }


def lazy_names(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the ``__getattr__``, the ``__dir__`` and the ``__all__`` of a module that has a stub.

    The stub is what type checkers read. It has a line such as ``from .part import Name as Name`` for each name.

    Args:
        module: its name.
    """
    owner: Any = sys.modules[module]
    found = {name: place for name, place in places(module).items() if place.startswith(".")}

    def get(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        from .importing import importing  # imported here, as plugins import names when they are imported themselves

        gc_enabled = gc.isenabled()
        gc.disable()  # a finalizer may use a name of a module that is partially imported
        try:
            with importing():
                value = getattr(importlib.import_module(found[name], owner.__spec__.parent), name)
            setattr(owner, name, value)
        finally:
            if gc_enabled:
                gc.enable()
        return value

    return get, lambda: sorted(found), sorted(found)
