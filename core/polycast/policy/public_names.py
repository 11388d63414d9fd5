"""The names that plugins add to ``polycast``, such as ``polycast.observe``."""

from typing import Any

from . import manifests

_OWN = {
    "dropin": ("patch_torch",),
    "fastest": ("DeviceProfile", "Fastest", "find_profile", "profile"),
    "observe": ("RunHistory", "RunLog", "grad_scaler", "observe"),
    "out_dtype": ("out_dtype",),
    "precision": ("Reference", "compare", "equalize", "explain", "tune"),
    "quantize": ("Float8", "Int4", "Int8"),
}
"""The names of polycast's own plugins, for the error where such a plugin is not installed."""


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
        plugin = next((plugin for plugin, own in _OWN.items() if name in own), None)
        remedy = f": it is of the plugin {plugin!r}, which is not installed. Install polycast again" if plugin else ""
        raise AttributeError(f"module 'polycast' has no attribute {name!r}{remedy}")
    return found
