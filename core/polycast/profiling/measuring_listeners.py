"""Listeners for measurements of a device, whose ops do not belong to the program."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..common.listeners import Listeners

listeners: Listeners[Callable[[bool], object]] = Listeners()
"""Called with True when measuring begins on a thread, on that thread, and with False when it ends."""


@contextmanager
def measuring() -> Iterator[None]:
    """Notify the listeners that this thread measures during a block."""
    notified = list(listeners)
    for listener in notified:
        listener(True)
    try:
        yield
    finally:
        for listener in notified:
            listener(False)
