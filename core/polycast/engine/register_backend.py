"""Backends that are registered by hand."""

from ..registry.backend import Backend, validate
from ..registry.registry import registry
from .installation import run_uninstalled


def register_backend(backend: Backend) -> None:
    """Register a backend by hand; it takes precedence over those from entry points.

    Args:
        backend: an instance of a subclass of :class:`polycast.plugin.Backend`.

    Raises:
        InvalidBackendError: it violates the contract (a ValueError); nothing is registered.
        ValueError: a backend for its device type is already registered by hand.
        RuntimeError: a thread is in a region for the device; nothing is registered.
    """
    validate(backend)
    registry.loaders()  # not with the engine's lock held
    run_uninstalled([backend.device_type], lambda: registry.register(backend))


def unregister_backend(device_type: str) -> None:
    """Undo ``register_backend``; the device type uses the backend from an entry point again, if there is one.

    Raises:
        BackendNotFoundError: no backend for `device_type` is registered by hand.
        RuntimeError: a thread is in a region for the device; nothing changes.
    """
    name = registry.parse_device_type(device_type)
    registry.loaders()
    run_uninstalled([name], lambda: registry.unregister(name))
