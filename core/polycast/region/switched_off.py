"""Track, for each thread, where a module rule has switched autocast off: only there may another rule switch it on.

:func:`capture` carries it to other threads, and checkpoints to the recomputation.
"""

import threading
from collections.abc import Collection, Mapping

import torch
from torch.compiler import is_dynamo_compiling

from ..engine import state


class _Thread(threading.local):
    def __init__(self) -> None:
        self.off: Mapping[str, int] | None = None
        """By device, the nesting of regions when a rule switched autocast off. Never mutated."""


_thread = _Thread()


def on_any_device() -> bool:
    """Return whether a rule may have switched autocast off for any device; cheaper than asking for each."""
    return _thread.off is not None


def is_off(device: str) -> bool:
    """Return whether autocast is off because of a rule, and not of a region inside the rule's module."""
    off = _thread.off
    if off is None or device not in off:
        return False
    # In compiled code, regions are torch's, which are not counted.
    return is_dynamo_compiling() or off[device] == state.machine.nesting(device)


def enter(device: str) -> Mapping[str, int] | None:
    """Note that a rule has switched autocast off; return the argument for :func:`leave`."""
    before = _thread.off
    depth = 0 if is_dynamo_compiling() else state.machine.nesting(device)
    _thread.off = {device: depth} if before is None else {**before, device: depth}
    return before


def leave(before: Mapping[str, int] | None) -> None:
    """Restore the state before :func:`enter` or :func:`set_devices`."""
    _thread.off = before


def devices() -> frozenset[str]:
    """Return the devices for which autocast is off because of a rule."""
    return frozenset(device for device in _thread.off or () if not torch.is_autocast_enabled(device) and is_off(device))


def current() -> Mapping[str, int] | None:
    """Return the argument for :func:`leave` that restores the state after :func:`set_devices`."""
    return _thread.off


def set_devices(off: Collection[str]) -> None:
    """Let autocast count as switched off by a rule for these devices alone."""
    _thread.off = {device: state.machine.nesting(device) for device in off} or None
