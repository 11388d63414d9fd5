"""Writes to weights without a new version: each is counted here, and casts of what was written before are invalid."""

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...common.atfork import hold_during_fork
from ...torch_internals.patcher import Patch
from ...torch_internals.private_names import disable_dynamo, has_storage, without_torch_function
from ..casts.weights import TensorBase

_T = TypeVar("_T")

_stores: "weakref.WeakSet[Any]" = weakref.WeakSet()
_lock = threading.RLock()
_pending: dict[int, StorageWeakRef] = {}
"""The storages that a collective may still write, by identity."""
_last_writes: dict[int, int] = {}
"""By identity of the storages of weights that were cast, a number for their last write."""
_next = itertools.count(1).__next__
_last_write_of_all = 0
"""A number for the last time that any weight may have been written."""
_modes = 0
"""The number of dispatch modes that threads are in."""


class _Thread(threading.local):
    reading: frozenset[int] = frozenset()
    """The storages of tensors that the thread only reads."""


_thread = _Thread()


def add_store(store: Any) -> None:
    """Add a store of casts, as long as it is alive: its `forget` is called with weights to drop references to."""
    with _lock:
        _stores.add(store)


def all_stores() -> list[Any]:
    """Return the stores that are alive."""
    with _lock:
        return list(_stores)


hold_during_fork(lambda: [_lock, *(store.lock for store in all_stores())])


def last_write(storage: int) -> int:
    """Return a number for the last write to a storage, and note writes to it from now on."""
    return _last_writes.setdefault(storage, 0)


def last_write_of_all() -> int:
    """Return a number for the last time that any weight may have been written."""
    return _last_write_of_all


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
    if not _last_writes:
        return
    with without_torch_function():
        if has_storage(tensor) and TensorBase.untyped_storage(tensor)._cdata not in _thread.reading:
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
    """Invalidate the casts of weights that were written without a new version.

    Args:
        tensors: the weights, or tensors on their memory; None if any weight may have been written.
        is_pending: whether the writes may go on. Then no casts are cached until the storages are freed.
    """
    global _last_write_of_all
    if tensors is None:
        _last_write_of_all = _next()
        return
    storages = [TensorBase.untyped_storage(tensor) for tensor in tensors if has_storage(tensor)]
    for storage in storages:
        if storage._cdata in _last_writes:
            _last_writes[storage._cdata] = _next()
    if is_pending:
        with _lock:
            for freed in [storage for storage, reference in _pending.items() if _is_freed(reference)]:
                del _pending[freed]
            _pending.update({storage._cdata: reserve(storage) for storage in storages})


def reserve(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Return a reference that keeps the identity of a storage from being used again."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_freed(reference: StorageWeakRef) -> bool:
    return bool(reference.expired())  # type: ignore[no-untyped-call]


def forget(tensors: Iterable[torch.Tensor]) -> None:
    """Drop the entries of weights, and the references to them."""
    for tensor in tensors:
        for store in all_stores():
            store.forget(tensor)


_EXPOSING_METHODS = ("numpy", "untyped_storage", "data_ptr", "apply_", "map_", "map2_")
"""The methods that expose a tensor's memory to writes which change no version, or write so themselves."""


def hook_aliases(patch: Patch) -> None:
    """Note what exposes a tensor's memory, except where something else has replaced a method of torch.Tensor.

    torch defines the methods in a class that cannot be changed, so the hooks are added to its subclass torch.Tensor.
    """
    hooks: dict[str, Any] = {"data": _data()} | {name: _method(name) for name in _EXPOSING_METHODS}
    for name, hook in hooks.items():
        if name not in vars(torch.Tensor):
            patch.replace(torch.Tensor, name, hook)
    clear_method_lists()


def clear_method_lists() -> None:
    """Clear torch's lists of the methods of tensors, some of which were replaced."""
    for name in ("get_testing_overrides", "_get_overridable_functions", "_get_tensor_methods"):
        clear = getattr(getattr(torch.overrides, name, None), "cache_clear", None)
        if clear is not None:
            clear()


def _data() -> property:
    torchs = vars(TensorBase)["data"]

    def data(tensor: torch.Tensor) -> Any:
        alias = torchs.__get__(tensor)
        note_alias(tensor)
        return alias

    return property(data, torchs.__set__, torchs.__delete__, torchs.__doc__)


def _method(name: str) -> Callable[..., Any]:
    torchs = vars(TensorBase)[name]

    @functools.wraps(torchs)
    @disable_dynamo  # it does not trace torch's either, but would report it
    def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return torchs(tensor, *args, **kwargs)
        finally:
            note_alias(tensor)

    method.__module__, method.__qualname__ = "torch", f"Tensor.{name}"  # for pickle
    return method
