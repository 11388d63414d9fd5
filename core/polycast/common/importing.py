"""Import code of others without a lock of ours: Python locks each module, and two threads could wait for each other."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .atfork import hold_during_fork

LONGEST_WAIT = 10
"""Seconds that a fork waits for an import, which may hang, or need what the thread that forks imports itself."""


class _Import:
    """An import that a thread makes now: a lock that only forks wait for."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking, LONGEST_WAIT if blocking else -1)

    def release(self) -> None:
        self._lock.release()


_imports: list[_Import] = []
_lock = threading.RLock()  # reentrant: a signal handler may import
hold_during_fork(lambda: [_lock, *_imports])
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_imports.clear)  # other threads do not exist there


@contextmanager
def importing() -> Iterator[None]:
    """Let a fork of another thread wait for the import in the block: the child could never finish it."""
    mine = _Import()
    mine.acquire()
    try:
        with _lock:
            _imports.append(mine)
        yield
    finally:
        mine.release()
        with _lock:
            if mine in _imports:  # not in a child that was forked by the import
                _imports.remove(mine)
