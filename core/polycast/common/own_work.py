"""Listeners for polycast's own work, such as a measurement, whose ops do not belong to the program."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .listeners import Listeners

listeners: Listeners[Callable[[bool], object]] = Listeners()
"""Called with True when such work begins on a thread, on that thread, and with False when it ends."""


@contextmanager
def own_work() -> Iterator[None]:
    """Notify the listeners that this thread works for polycast during a block, or, as a decorator, a call."""
    notified = list(listeners)
    for listener in notified:
        listener(True)
    try:
        yield
    finally:
        for listener in notified:
            listener(False)
