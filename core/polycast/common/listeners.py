"""`Listeners`: the listeners of an event, each for one thread or for all."""

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from .atfork import hold_during_fork

_L = TypeVar("_L")


class Listeners(Generic[_L]):
    """The listeners of an event.

    Args:
        start: called when the first listener is added.
        stop: called when the last one is removed.
    """

    def __init__(self, start: Callable[[], object] | None = None, stop: Callable[[], object] | None = None) -> None:
        self._start = start
        self._stop = stop
        self._listeners: tuple[tuple[_L, int | None], ...] = ()
        self._lock = threading.RLock()
        hold_during_fork(lambda: [self._lock])

    def add(self, listener: _L, thread: int | None = None) -> None:
        """Add a listener for the events of a thread, or of all threads."""
        with self._lock:
            is_first = not self._listeners
            self._listeners = (*self._listeners, (listener, thread))
            if is_first and self._start is not None:
                self._start()

    def remove(self, listener: _L) -> None:
        """Remove all listeners equal to this one."""
        with self._lock:
            others = tuple(each for each in self._listeners if each[0] != listener)
            was_last = bool(self._listeners) and not others
            self._listeners = others
            if was_last and self._stop is not None:
                self._stop()

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def here(self) -> bool:
        """Return whether there are listeners for events of this thread."""
        return next(iter(self), None) is not None

    def __iter__(self) -> Iterator[_L]:
        """Iterate over the listeners for events of this thread."""
        here = threading.get_ident()
        return iter([listener for listener, thread in self._listeners if thread is None or thread == here])
