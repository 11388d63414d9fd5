"""The hooks that plugins implement for a device, and the pluggy markers for them."""

import pluggy

from .backend import Backend, Extension

PROJECT = "polycast"
ENTRY_POINT_GROUP = "polycast.backends"
EXTENSIONS_GROUP = "polycast.extensions"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def polycast_backend() -> Backend:  # type: ignore[empty-body]
    """Return the backend. Called once per process, when the device is first used or observed."""


@hookspec
def polycast_extension() -> Extension:  # type: ignore[empty-body]
    """Return what the package adds to a device. Called once per process, when the device is first used or observed."""
