"""Listeners for the measuring of a device, whose ops are no part of the program."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..common.listeners import Listeners

listeners: Listeners[Callable[[bool], object]] = Listeners()
"""They get whether measuring begins or ends on this thread."""


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
