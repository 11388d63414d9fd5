"""Read and set this thread's autocast state without regions."""

import torch

from ..engine import state
from ..engine.casts.cast_cache import process_cache
from ..engine.installation import kernels_of
from ..errors import BackendNotFoundError
from ..registry.checks import ask
from ..registry.registry import registry
from ..torch_internals.dispatcher import has_autocast_key


def _device_type(device_type: str) -> str:
    name = registry.parse_device_type(device_type)
    if not has_autocast_key(name):
        raise BackendNotFoundError(
            f"torch has no Autocast dispatch key for {name!r}, so it has no autocast state and can have no backend."
        )
    return name


def is_autocast_enabled(device_type: str) -> bool:
    """Return whether autocast is enabled for a device on this thread, by polycast or by torch.

    Raises:
        ValueError: `device_type` is not a str.
        RuntimeError: torch does not know the device string, or has no Autocast key for it.
    """
    return torch.is_autocast_enabled(_device_type(device_type))


def set_autocast_enabled(device_type: str, enabled: bool) -> None:
    """Enable or disable autocast for a device on this thread, until it is set again or the enclosing region is left.

    Enabling installs the backend's kernels.

    Raises:
        ValueError, RuntimeError: as :func:`polycast.plugin.get_backend`.
        TypeError: `enabled` is not a bool.
    """
    name = _device_type(device_type)
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled must be a bool, got {enabled!r}")
    if enabled:
        backend = registry.find(name)
        kernels_of(name)
        torch.set_autocast_dtype(name, state.current_dtype(name, backend.default_dtype))
    torch.set_autocast_enabled(name, enabled)


def get_autocast_dtype(device_type: str) -> torch.dtype:
    """Return the fast dtype of a device on this thread; until one is set, the backend's default.

    Raises:
        ValueError, RuntimeError: as :func:`polycast.plugin.get_backend`.
    """
    name = _device_type(device_type)
    return state.current_dtype(name, registry.find(name).default_dtype)


def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
    """Set the fast dtype of a device on this thread, until it is set again or the enclosing region is left.

    Args:
        device_type: a device string that torch knows.
        dtype: a floating-point dtype that the device's backend supports.

    Raises:
        ValueError: the dtype is not floating point or not supported; nothing changes.
        TypeError: `dtype` is not a torch.dtype.
        ValueError, RuntimeError: as :func:`polycast.plugin.get_backend`.
    """
    name = _device_type(device_type)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"the fast dtype must be floating point, got {dtype}")
    answer = ask(registry.find(name), dtype)
    if not answer:
        raise ValueError(f"{dtype} cannot be the fast dtype: {answer.reason}")
    state.choose_dtype(name, dtype)


def is_autocast_cache_enabled() -> bool:
    """Return whether this thread's regions cache casts of weights."""
    return torch.is_autocast_cache_enabled()


def set_autocast_cache_enabled(enabled: bool) -> None:
    """Enable or disable the caching of casts of weights on this thread.

    Raises:
        TypeError: `enabled` is not a bool.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled must be a bool, got {enabled!r}")
    torch.set_autocast_cache_enabled(enabled)


def clear_autocast_cache(all_threads: bool = False) -> None:
    """Drop the casts that this thread's regions cache, the prepacked weights of recipes, and torch's cached casts.

    A :class:`WeightCache` is not affected: call its ``clear()``.

    Args:
        all_threads: drop those of other threads' regions, too. A thread in a region drops its own when it next uses a
            weight.

    Raises:
        TypeError: `all_threads` is not a bool.
    """
    if not isinstance(all_threads, bool):
        raise TypeError(f"all_threads must be a bool, got {all_threads!r}")
    state.machine.clear_own_casts(all_threads)
    prepacked = process_cache.existing
    if prepacked is not None:
        prepacked.clear()
    state.clear_torchs_cache()


def autocast_nesting(device_type: str) -> int:
    """Return the number of polycast regions for a device that this thread is in (torch does not count by device).

    Raises:
        ValueError, RuntimeError: `device_type` is not a device string that torch knows.
    """
    return state.machine.nesting(registry.parse_device_type(device_type))
