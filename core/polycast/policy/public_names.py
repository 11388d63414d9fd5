"""The names that plugins add to ``polycast``, such as ``polycast.observe``, and what to say of absent ones."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .manifests import Manifests

_OWN = {
    "dropin": ("patch_torch",),
    "fastest": ("DeviceProfile", "Fastest", "find_profile", "profile"),
    "observe": ("RunHistory", "RunLog", "grad_scaler", "observe"),
    "out_dtype": ("out_dtype",),
    "precision": ("Reference", "compare", "equalize", "explain", "tune"),
    "quantize": ("Equalization", "Float8", "Int4", "Int8"),
}
"""The names of polycast's own plugins, for the error where such a plugin is not installed."""
_METHODS = {"quantize": ("WeightCache.load", "WeightCache.save")}
"""The methods of classes of the core that they implement."""
_RECIPES = {"fastest": ("fastest",), "quantize": ("float8", "int4", "int8")}
"""The kinds of their recipes."""


def names() -> set[str]:
    """Return the names that the installed plugins add."""
    return {name for each in _manifests() for name in each.plugin.names}


def find(name: str) -> Any:
    """Return the object that a plugin adds to ``polycast`` under a name.

    Raises:
        AttributeError: no installed plugin has it.
        RuntimeError: several plugins have it, or it cannot be imported.
    """
    found = _manifests().find("names", name)
    if found is None:
        raise AttributeError(f"module 'polycast' has no attribute {name!r}{_remedy(name, _OWN)}")
    return found


def method(name: str) -> Callable[..., Any]:
    """Return the function that implements a method of a class of the core, ``Class.method``, in a plugin.

    Raises:
        NotImplementedError: no installed plugin has it.
        RuntimeError: several plugins have it, or it cannot be imported.
    """
    found: Callable[..., Any] | None = _manifests().find("methods", name)
    if found is None:
        raise NotImplementedError(f"polycast has no {name}{_remedy(name, _METHODS)}")
    return found


def _manifests() -> "Manifests":
    from . import manifests  # a region with a WeightCache needs none

    return manifests.manifests()


def remedy_for_recipe(kind: str) -> str:
    """Return the end of a sentence that says whose a kind of recipes is, if it is that of an absent plugin, or ""."""
    return _remedy(kind, _RECIPES)


def _remedy(name: str, table: Mapping[str, Sequence[str]]) -> str:
    plugin = next((plugin for plugin, own in table.items() if name in own), None)
    return f": it is of the plugin {plugin!r}, which is not installed. Install polycast again" if plugin else ""
