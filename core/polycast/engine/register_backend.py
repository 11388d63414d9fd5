"""Backends that are registered by hand, and backends whose answers change."""

from ..common import generation
from ..registry.backend import Backend, validate
from ..registry.registry import registry
from . import state
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


def refresh(device_type: str) -> None:
    """Ask the backend of a device again, and resolve the settings of later regions again.

    That a device, a dtype or a recipe is available is asked once in a process, as torch asks once for a driver; a
    refusal is asked again each time. A backend calls this when such an answer, its `default_dtype`, or what its recipes
    are resolved to changes. Registering and unregistering a backend, and :func:`polycast.uninstall`, do the same.

    Args:
        device_type: a device string that torch knows, such as ``"cuda"``.

    Raises:
        ValueError, RuntimeError: `device_type` is not a device string that torch knows.
    """
    registry.parse_device_type(device_type)
    generation.advance()
    state.machine.forget_actions()
