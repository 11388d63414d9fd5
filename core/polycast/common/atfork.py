"""Hold locks during a fork, so that the child finds their data consistent and the locks free."""

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Lock: TypeAlias = Any  # a threading.Lock or RLock, or alike

_locks: list[Callable[[], Iterable[Lock]]] = []


class _Forks(threading.local):
    def __init__(self) -> None:
        self.held: list[list[Lock]] = []
        """For each fork of this thread, one in the hooks of another: what it holds."""


_forks = _Forks()


def hold_during_fork(locks: Callable[[], Iterable[Lock]]) -> None:
    """Acquire locks before each fork, and release them after it in the parent and the child.

    They need no order: the forking thread waits for a lock only while it holds none. Other threads nest them as they
    like, and the garbage collector may take a lock wherever another is held.

    Args:
        locks: called before each fork; returns the locks.
    """
    _locks.append(locks)


def fork_safe_lock() -> Lock:
    """Return a reentrant lock that is held during each fork."""
    lock = threading.RLock()
    hold_during_fork(lambda: [lock])
    return lock


def call_in_forked_child(function: Callable[[], object]) -> None:
    """Call a function in the child of each fork, where other threads do not exist."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def _all_locks() -> dict[int, Lock]:
    """Return the locks by identity."""
    return {id(lock): lock for locks in _locks for lock in locks()}


def _acquire_all() -> None:
    """Acquire all locks. Where one is not free, release the others, wait for it, and try again."""
    held: list[Lock] = []
    _forks.held.append(held)  # first: an error of a signal handler ends the waiting, but not the fork
    awaited: Lock | None = None
    without: dict[int, Lock] = {}  # those that have a timeout
    while True:
        locks = _all_locks()
        if awaited is not None:
            if awaited.acquire(True):
                held.append(awaited)
            else:
                without[id(awaited)] = awaited
        done = {*without, *map(id, held)}
        awaited = next((lock for key, lock in locks.items() if key not in done and not _try(lock, held)), None)
        if awaited is None and _all_locks().keys() <= {*locks, *done}:  # none was made meanwhile
            return
        _release(held)


def _try(lock: Lock, held: list[Lock]) -> bool:
    """Acquire a lock, if it is free, and add it to those that are held."""
    is_free: bool = lock.acquire(False)
    if is_free:
        held.append(lock)
    return is_free


def _release(held: list[Lock]) -> None:
    while held:
        held.pop().release()


def _release_all() -> None:
    if _forks.held:
        _release(_forks.held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_acquire_all, after_in_parent=_release_all, after_in_child=_release_all)
