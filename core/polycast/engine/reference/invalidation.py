"""Invalidation: dropping casts of weights whose memory was written, or exposed, without a new version."""

import threading
import weakref
from collections.abc import Callable, Iterable, Set
from typing import Protocol, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...common.atfork import Lock, hold_during_fork
from ...torch_internals.private_names import has_storage, without_torch_function
from ..casts.weights import TensorBase

_T = TypeVar("_T")


class Invalidated(Protocol):
    """A store of casts."""

    @property
    def lock(self) -> Lock:
        """The store's lock, which is held during a fork."""

    def invalidate(self, storages: Set[int]) -> None:
        """Drop the casts of weights in storages that were written."""

    def invalidate_all(self) -> None:
        """Drop all casts but those that torch would keep, whatever is written."""

    def forget(self, weight: torch.Tensor) -> None:
        """Drop the entries of a weight, and the reference to it."""


_stores: "weakref.WeakSet[Invalidated]" = weakref.WeakSet()
_lock = threading.RLock()
_pending: dict[int, StorageWeakRef] = {}
"""The storages that a collective may still write, by identity."""
_tracked: set[int] = set()
"""The storages of weights that were cast, by identity. Some of the casts may be gone."""


_modes = 0
"""The number of dispatch modes that threads are in."""


class _Thread(threading.local):
    reading: frozenset[int] = frozenset()
    """The storages of tensors that the thread only reads."""


_thread = _Thread()


def add_store(store: Invalidated) -> None:
    """Invalidate a store's casts from now on, as long as it is alive."""
    with _lock:
        _stores.add(store)


def all_stores() -> list[Invalidated]:
    """Return the stores that are alive."""
    with _lock:
        return list(_stores)


hold_during_fork(lambda: [_lock, *(store.lock for store in all_stores())])


def track(weight: torch.Tensor) -> StorageWeakRef:
    """Track aliases of a weight's memory; return a reference that reserves the identity of its storage."""
    storage = TensorBase.untyped_storage(weight)
    _tracked.add(storage._cdata)
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def may_be_written(storage: int) -> bool:
    """Return whether a collective may still write a storage."""
    return storage in _pending


def read(tensor: torch.Tensor, function: Callable[[], _T]) -> _T:
    """Call a function that only reads the memory of a tensor: aliases that this thread makes of it drop no casts."""
    outer = _thread.reading
    if has_storage(tensor):
        _thread.reading = outer | {TensorBase.untyped_storage(tensor)._cdata}
    try:
        return function()
    finally:
        _thread.reading = outer


def note_alias(tensor: torch.Tensor) -> None:
    """Drop the casts of weights on a tensor's memory, which was exposed to writes without a new version."""
    if not _tracked:
        return
    with without_torch_function():
        if has_storage(tensor):
            storage = TensorBase.untyped_storage(tensor)._cdata
            if storage in _tracked and storage not in _thread.reading:
                note_writes([tensor])


def enter_mode() -> None:
    """Cache no casts, but those that torch would, until a dispatch mode is left: it may write any weight."""
    global _modes
    with _lock:
        _modes += 1
    note_writes(None)


def leave_mode() -> None:
    """Note that a dispatch mode was left, perhaps one that was entered before this was called for modes."""
    global _modes
    with _lock:
        _modes = max(0, _modes - 1)


def modes_may_write() -> bool:
    """Return whether a thread is in a dispatch mode."""
    return _modes > 0


def begin_capture() -> None:
    """Return None: Python does not see what ops write. So each replay drops all casts."""


def note_writes(tensors: Iterable[torch.Tensor] | None, *, is_pending: bool = False) -> None:
    """Drop the casts of weights that were written without a new version.

    Args:
        tensors: the weights, or tensors on their memory; None if any weight may have been written.
        is_pending: whether the writes may go on. Then no casts are cached until the storages are freed.
    """
    if tensors is None:
        for store in all_stores():
            store.invalidate_all()
        return
    written = {
        storage._cdata: StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        for storage in (TensorBase.untyped_storage(tensor) for tensor in tensors if tensor.layout is torch.strided)
    }
    _tracked.difference_update(written)
    if is_pending:
        with _lock:
            for storage in [storage for storage, reference in _pending.items() if _is_freed(reference)]:
                del _pending[storage]
            _pending.update(written)
    for store in all_stores():
        store.invalidate(written.keys())


def _is_freed(reference: StorageWeakRef) -> bool:
    return bool(reference.expired())  # type: ignore[no-untyped-call]


def forget(tensors: Iterable[torch.Tensor]) -> None:
    """Drop the entries of weights, and the references to them."""
    for tensor in tensors:
        for store in all_stores():
            store.forget(tensor)
