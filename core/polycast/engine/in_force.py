"""Which policies are in force on this thread, and in which regions casts are kept: as a text, a guard of compiled code.

It says what results, whatever regions were entered and however they will be left: the override and the cache of the
innermost region for each device, as the state machine has it. Those of a disabled region too, for code in it may enable
autocast again.
"""

import threading

from ..common.atfork import hold_during_fork
from . import state

_devices: tuple[str, ...] = ()
"""The devices for which policies were ever in force in this process: others need no asking."""
_lock = threading.RLock()
hold_during_fork(lambda: [_lock])


def policies_in_force() -> str:
    """Return the policies of this thread's regions: the same text for equal ones, and an empty one for none."""
    found = ""
    for device_type in _devices:
        region = state.machine.innermost(device_type)
        if region is not None and region[0]:
            found += device_type + region[0].text
    return found


def in_force() -> str:
    """Return the policies of this thread's regions, and which of these have a cache; for neither an empty text."""
    found = policies_in_force()
    for device_type in _devices:
        region = state.machine.innermost(device_type)
        if region is not None and region[1] is not None:
            found += f"+{device_type} cache"
    return found


def heed(device_type: str) -> None:
    """Have the policies for a device looked at from now on."""
    global _devices
    if device_type not in _devices:
        with _lock:
            _devices = tuple(sorted({*_devices, device_type}))
