"""Where a rule for a module has switched autocast off: there another rule may switch it on, as it may not elsewhere.

Kept for each thread, and taken by :func:`capture` to another one and to what a checkpoint recomputes.
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
        """By device, how deep in regions this thread was when a rule switched autocast off; never changed."""


_thread = _Thread()


def anywhere() -> bool:
    """Say whether it may be off for a rule on any device; costs less than asking for each."""
    return _thread.off is not None


def by_rule(device: str) -> bool:
    """Say whether autocast is off for a rule, and not for a region inside the module that it is for."""
    off = _thread.off
    if off is None or device not in off:
        return False
    # Compiled code, whose regions are torch's, has no count of them.
    return is_dynamo_compiling() or off[device] == state.machine.nesting(device)


def enter(device: str) -> Mapping[str, int] | None:
    """Note that a rule has just switched autocast off; return what :func:`leave` is to be given."""
    before = _thread.off
    depth = 0 if is_dynamo_compiling() else state.machine.nesting(device)
    _thread.off = {device: depth} if before is None else {**before, device: depth}
    return before


def leave(before: Mapping[str, int] | None) -> None:
    """Note what was so before."""
    _thread.off = before


def devices() -> frozenset[str]:
    """Return the devices that autocast is off for, here, for a rule."""
    return frozenset(
        device for device in _thread.off or () if not torch.is_autocast_enabled(device) and by_rule(device)
    )


@contextmanager
def for_devices(off: Collection[str]) -> Iterator[None]:
    """Return a context manager in which the regions of now are off for a rule on these devices, and on no others."""
    before = _thread.off
    _thread.off = {device: state.machine.nesting(device) for device in off} or None
    try:
        yield
    finally:
        _thread.off = before
