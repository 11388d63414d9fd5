"""This thread's autocast state: as settings to enter elsewhere, and as the text that compiled code is guarded on.

Both describe what results from the regions, however they were entered and will be left. The text covers the override
and the cache of the innermost region for each device, also where that is disabled: code in it may enable autocast.
"""

import torch

from ..common.atfork import fork_safe_lock
from ..torch_internals.dispatcher import autocast_supported_devices
from . import state
from .state import Settings

_guarded: tuple[str, ...] = ()
"""The devices that had an override or a cache at some time in this process. The text leaves out the others."""
_lock = fork_safe_lock()


def snapshot() -> tuple[Settings, ...]:
    """Return absolute settings for each device that this thread has a region for, or autocast enabled."""
    found = []
    for device_type in autocast_supported_devices():
        enabled = torch.is_autocast_enabled(device_type)
        if enabled or state.machine.nesting(device_type):
            dtype, cache_enabled = torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()
            override, cache = state.machine.innermost(device_type)
            found.append(Settings(device_type, enabled, dtype, cache_enabled, override, cache, absolute=True))
    return tuple(found)


def overrides_text(with_caches: bool = False) -> str:
    """Return the overrides of this thread's regions: the same text for equal ones, empty for none.

    Args:
        with_caches: include which devices have a cache.
    """
    found = ""
    for device_type in _guarded:
        override, cache = state.machine.innermost(device_type)
        if override is not None:
            found += device_type + override.text
        if with_caches and cache is not None:
            found += f"+{device_type} cache"
    return found


def guard_on(device_type: str) -> None:
    """Include the override and the cache of a device in the text from now on."""
    global _guarded
    if device_type not in _guarded:
        with _lock:
            _guarded = tuple(sorted({*_guarded, device_type}))
