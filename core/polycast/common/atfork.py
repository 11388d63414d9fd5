"""Locks that are held over a fork, so that what they guard is whole in the child, and no thread holds them there."""

import os
from collections.abc import Callable, Iterable
from typing import Protocol


class Lock(Protocol):
    """What threading.Lock and threading.RLock return."""

    def acquire(self) -> bool:
        """Wait for it, and take it."""

    def release(self) -> None:
        """Give it back."""


def hold_during_fork(locks: Callable[[], Iterable[Lock]]) -> None:
    """Have locks taken before each fork and given back after it, on both sides.

    Those of several calls are taken in the reverse order of the calls. A module that takes a lock of another imports it
    first, and calls this later: so locks are taken in the order in which they nest.

    Args:
        locks: returns the locks, in the order in which they nest; called before each fork.
    """
    held: list[Lock] = []

    def take() -> None:
        for lock in locks():
            lock.acquire()
            held.append(lock)

    def give_back() -> None:
        while held:
            held.pop().release()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=take, after_in_parent=give_back, after_in_child=give_back)
