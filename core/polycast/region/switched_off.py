"""Track, for each thread, where a module rule has switched autocast off: only there may another rule switch it on.

:func:`capture` carries it to other threads, and checkpoints to the recomputation.
"""

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

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
    """Restore the state before :func:`enter`."""
    _thread.off = before


def devices() -> frozenset[str]:
    """Return the devices for which autocast is off because of a rule."""
    return frozenset(device for device in _thread.off or () if not torch.is_autocast_enabled(device) and is_off(device))


@contextmanager
def for_devices(off: Collection[str]) -> Iterator[None]:
    """Return a context manager in which autocast counts as switched off by a rule for these devices alone."""
    before = _thread.off
    _thread.off = {device: state.machine.nesting(device) for device in off} or None
    try:
        yield
    finally:
        _thread.off = before
