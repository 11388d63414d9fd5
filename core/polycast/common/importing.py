"""Import code of plugins without deadlocks: Python locks each module while it is imported."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

from .atfork import Lock, call_in_forked_child, hold_during_fork

LONGEST_WAIT = 10
"""Seconds to wait for an import, which may hang or be waiting for this thread."""

_imports: list[Lock] = []
"""The imports in progress, as locks that only forks wait for."""
_lock = threading.RLock()  # reentrant: a signal handler may import
hold_during_fork(lambda: [_lock, *_imports])
call_in_forked_child(_imports.clear)


def acquire(lock: Any) -> bool:
    """Acquire an RLock that is held during an import, and return whether it was acquired.

    A thread that is importing a module waits for a limited time, since the other import may need that module.
    """
    return bool(lock.acquire(timeout=LONGEST_WAIT if _is_in_import() else -1))


def _is_in_import() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


@contextmanager
def importing() -> Iterator[None]:
    """Make forks in other threads wait for the import in the block, which the child could never finish."""
    lock = threading.RLock()
    mine = SimpleNamespace(
        acquire=lambda blocking: lock.acquire(blocking, LONGEST_WAIT if blocking else -1), release=lock.release
    )
    try:
        with lock:
            with _lock:
                _imports.append(mine)
            yield
    finally:
        with _lock:
            if mine in _imports:  # not in a child that was forked by the import
                _imports.remove(mine)
