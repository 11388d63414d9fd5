"""The names that plugins add to ``polycast``, such as ``polycast.observe``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import manifests

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
"""The methods of classes of the core that plugins implement."""


def names() -> set[str]:
    """Return the names that the installed plugins add."""
    return {name for each in manifests.manifests() for name in each.plugin.names}


def find(name: str) -> Any:
    """Return the object that a plugin adds to ``polycast`` under a name.

    Raises:
        AttributeError: no installed plugin has it.
        RuntimeError: several plugins have it, or it cannot be imported.
    """
    found = manifests.manifests().find("names", name)
    if found is None:
        raise AttributeError(f"module 'polycast' has no attribute {name!r}{_remedy(name, _OWN)}")
    return found


def method(name: str) -> Callable[..., Any]:
    """Return the function that implements a method of a class of the core, ``Class.method``, in a plugin.

    Raises:
        NotImplementedError: no installed plugin has it.
        RuntimeError: several plugins have it, or it cannot be imported.
    """
    found: Callable[..., Any] | None = manifests.manifests().find("methods", name)
    if found is None:
        raise NotImplementedError(f"polycast has no {name}{_remedy(name, _METHODS)}")
    return found


def _remedy(name: str, table: Mapping[str, Sequence[str]]) -> str:
    plugin = next((plugin for plugin, own in table.items() if name in own), None)
    return f": it is of the plugin {plugin!r}, which is not installed. Install polycast again" if plugin else ""
