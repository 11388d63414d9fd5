"""The device ``npy``, whose kernels are NumPy's, and autocast for it."""

from polycast.plugin import Backend, hookimpl

from .backend import NpyBackend
from .device import register_device

__all__ = ["NpyBackend", "polycast_backend", "register_device"]


@hookimpl
def polycast_backend() -> Backend:
    """Return the backend of ``npy``; from here on torch knows the device by this name."""
    register_device()
    return NpyBackend()
