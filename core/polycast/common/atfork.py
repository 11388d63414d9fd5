"""Hold locks during a fork, so that the child finds their data consistent and the locks free."""

import os
from collections.abc import Callable, Iterable
from typing import Protocol


class Lock(Protocol):
    """A threading.Lock or RLock."""

    def acquire(self) -> bool:
        """Acquire the lock."""

    def release(self) -> None:
        """Release the lock."""


def hold_during_fork(locks: Callable[[], Iterable[Lock]]) -> None:
    """Acquire locks before each fork, and release them after it in the parent and the child.

    The locks of the last call are acquired first. A module that uses another module's lock imports that module first,
    so this is the order in which the locks nest.

    Args:
        locks: called before each fork; returns the locks, outermost first.
    """
    held: list[Lock] = []

    def acquire() -> None:
        for lock in locks():
            lock.acquire()
            held.append(lock)

    def release() -> None:
        while held:
            held.pop().release()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=acquire, after_in_parent=release, after_in_child=release)
