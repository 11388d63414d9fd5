"""Names of a module that are imported when they are first used."""

import gc
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    module: str, places: Mapping[str, str], explain: Callable[[str], str] | None = None
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module.

    Args:
        module: its name.
        places: the module of the package that has each name, relative to ``polycast``.
        explain: given an unknown name, returns what to add to the error, or "".
    """

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(
                f"module {module!r} has no attribute {name!r}{'' if explain is None else explain(name)}"
            )
        gc_enabled = gc.isenabled()
        gc.disable()  # a finalizer may use a name of a module that is partially imported
        try:
            value = getattr(importlib.import_module(f"polycast.{places[name]}"), name)
            setattr(sys.modules[module], name, value)
        finally:
            if gc_enabled:
                gc.enable()
        return value

    return get
