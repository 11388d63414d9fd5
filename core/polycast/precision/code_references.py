"""Find the classes, globals and packages that values refer to.

Whether the code of a module counts depends on its origin: the code of Python, torch and polycast is identified by
name, because their versions are compared; of other installed packages the version and the code count, of the user's own
modules also the globals that the code names.
"""

import functools
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

_INSTALLED = {"site-packages", "dist-packages"}
_PYTHON = Path(sysconfig.get_path("stdlib"))


@functools.cache
def origin(module: str) -> Literal["known", "installed", "own"]:
    """Return whether a module is known by its version, installed, or the user's own."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    if top in ("torch", "polycast"):
        return "known"
    if file and not _INSTALLED.isdisjoint(Path(file).parts):
        return "installed"
    is_python = top in sys.stdlib_module_names and (not file or _PYTHON in Path(file).parents)
    return "known" if is_python else "own"


def cell_contents(cell: types.CellType) -> Any:
    """Return the contents of a closure's cell, or NotImplemented if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return NotImplemented


class References:
    """The classes, globals and package versions that values refer to, each once.

    Attributes:
        found: their names and values, in the order in which they were found.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, Any]] = []
        self._keys: set[object] = set()
        self._classes: dict[str, list[type]] = {}

    def _add(self, key: object, name: str, value: Any) -> None:
        if key not in self._keys:
            self._keys.add(key)
            self.found.append((name, value))

    def add_package(self, module: str) -> None:
        """Add the version of the package of a module, if it is installed."""
        top = module.partition(".")[0]
        if origin(module) == "installed":
            self._add(("package", top), f"package {top}", getattr(sys.modules.get(top), "__version__", None))

    def add_class(self, kind: type) -> str:
        """Add a class, and return its name."""
        name = f"{kind.__module__}.{kind.__qualname__}"
        if origin(kind.__module__) != "known":
            self.add_package(kind.__module__)
            same_name = self._classes.setdefault(name, [])  # keeps them alive, so that their ids are not reused
            if kind not in same_name:
                same_name.append(kind)
                number = len(same_name)
                self._add(id(kind), f"class {name}" + (f" ({number})" if number > 1 else ""), kind)
        return name

    def add_globals_of(self, function: types.FunctionType) -> None:
        """Add the globals that a user's function names, and the names that it uses of the user's modules."""
        scope = function.__globals__
        where = str(scope.get("__name__"))
        if origin(where) != "own":
            self.add_package(where)
            return
        names = list(dict.fromkeys(_names(function.__code__)))
        modules: list[Any] = [sys.modules.get(name) for name in names]  # the function may import them itself
        modules += map(cell_contents, function.__closure__ or ())
        searched = {where}
        for name in names:
            if name in scope:
                self._add_global(where, name, scope[name], modules)
        for module in modules:  # grows
            if isinstance(module, types.ModuleType) and module.__name__ not in searched:
                searched.add(module.__name__)
                if origin(module.__name__) == "own":
                    for name in names:
                        if name in vars(module):
                            self._add_global(module.__name__, name, vars(module)[name], modules)

    def _add_global(self, module: str, name: str, value: Any, modules: list[Any]) -> None:
        if isinstance(value, types.ModuleType):
            self.add_package(value.__name__)
            modules.append(value)
        elif isinstance(value, type):
            self.add_class(value)
        elif not (isinstance(value, types.FunctionType) and origin(value.__module__ or "") == "known"):
            self._add((module, name), f"{module}.{name}", value)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in code, nested functions included."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each)
