"""Names of a module that are imported when they are first used."""

import gc
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module.

    Args:
        module: its name.
        places: the module that has each name, relative to the package of the module.
    """

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        from .importing import importing  # imported here, as plugins import names when they are imported themselves

        owner = sys.modules[module]
        assert owner.__spec__ is not None
        gc_enabled = gc.isenabled()
        gc.disable()  # a finalizer may use a name of a module that is partially imported
        try:
            with importing():
                value = getattr(importlib.import_module(f".{places[name]}", owner.__spec__.parent), name)
            setattr(owner, name, value)
        finally:
            if gc_enabled:
                gc.enable()
        return value

    return get
