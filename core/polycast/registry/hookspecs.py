"""The hook that a backend's plugin implements, and the pluggy markers for it."""

import pluggy

from .backend import Backend

PROJECT = "polycast"
ENTRY_POINT_GROUP = "polycast.backends"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def polycast_backend() -> Backend:  # type: ignore[empty-body]
    """Return the backend. Called once per process, when the device is first used, or observed."""
