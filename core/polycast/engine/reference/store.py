"""The reference engine's stores of cached casts."""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import torch

from ...common.atfork import Lock
from ...errors import StaleWeightError
from ..casts.cached_cast import with_history
from ..casts.cast_cache import EntryKind, StoredEntry
from ..casts.not_prepacked import NO_ROOM, VIEWS_ARE_FULL, WRITTEN_UNSEEN
from ..casts.weights import STALE, Source, TensorBase, has_other_holders, storages_are_rewritten, weight_of
from .invalidation import add_store, all_stores, may_be_written, modes_may_write, read, track
from .store_entry import Entry, Prepacked, version_stamp

Key: TypeAlias = tuple[int, EntryKind, tuple[Any, ...]]
"""The identity of a weight, the kind of the entry, and the layout of a view."""


def _items(entries: Mapping[Key, Entry]) -> list[tuple[Key, Entry]]:
    """Return a mapping's items while weights die, and their entries with them.

    The garbage collector may run wherever an object is made. Listing the keys makes none, listing the items does.
    """
    keys = list(entries)
    return [(key, entry) for key in keys if (entry := entries.get(key)) is not None]


class PythonStore:
    """A store of casts. An entry for which there is no room is not cached; none is evicted.

    Args:
        max_bytes: as in WeightCache.
        verify: as in WeightCache.
        of_region: whether it is the store of a thread's regions, which also has the casts with autograd history.
    """

    def __init__(self, max_bytes: int | None = None, verify: bool = False, of_region: bool = False) -> None:
        self._of_region = of_region
        self._max_bytes = max_bytes
        self._verify = verify
        # Reentrant: a weight may die, and its entries with it, in the middle of any line below.
        self._lock = threading.RLock()
        self._entries: dict[Key, Entry] = {}
        self._with_history: dict[Key, Entry] = {}
        self._drops = 0  # the number of invalidations
        self._weights: dict[int, weakref.ref[torch.Tensor]] = {}
        self._bytes = self._hits = self._misses = 0
        add_store(self)

    @property
    def lock(self) -> Lock:
        """The lock of the store."""
        return self._lock

    def cast(self, source: Source, dtype: torch.dtype) -> torch.Tensor:
        """Return a weight or a view in `dtype`, without history: the cached cast, or a new one."""
        tensor = source.tensor
        key = (id(source.weight), dtype, source.layout)
        sees_all_writes = _sees_all_writes(source)
        with self._lock:
            entry = self._find(key, source)
            if (
                self._of_region
                and entry is not None
                and not (sees_all_writes and entry.sees_all_writes)
                and not self._as_torch(source)
            ):
                return _make_cast(tensor, dtype)
            if entry is None:
                stamp, storage = version_stamp(tensor), track(tensor)  # before the cast is made
                admitted = self._admits(source)
                entry = Entry(stamp, storage, (_make_cast(tensor, dtype),), sees_all_writes=sees_all_writes)
                self._insert(key, source, entry, admitted and _is_plain(entry.cast, dtype))
            elif self._verify and not _are_equal(tensor.detach().to(dtype), entry.cast):
                raise StaleWeightError(STALE)
            return entry.cast

    def prepacked(
        self, source: Source, prepack_id: int, prepack: Callable[[torch.Tensor], Prepacked]
    ) -> Prepacked | str:
        """Return the cached prepacked weight, or a new one by `prepack`.

        If it could not be cached it is not made, since that is more work than it saves: then return the reason.
        """
        tensor, elements = source.tensor, source.tensor.numel()
        key = (id(source.weight), prepack_id, source.layout)
        with self._lock:
            entry = self._find(key, source)
            if entry is not None:
                if entry.original is not None and not _are_equal(entry.original, tensor):
                    raise StaleWeightError(STALE)
                return entry.tensors
            if not self._admits(source):
                return WRITTEN_UNSEEN
            if source.layout and not self._views_fit(source.weight, elements):
                return VIEWS_ARE_FULL
            self._erase(key)
            if not self._has_room(elements):  # the least that it takes
                return NO_ROOM
            drops = self._drops
        stamp, storage = version_stamp(tensor), track(tensor)
        if not self._admits(source):
            return WRITTEN_UNSEEN
        entry = Entry(stamp, storage, read(tensor, lambda: prepack(tensor)))
        if self._verify:
            with torch.no_grad():
                entry.original = tensor.detach().clone()
        with self._lock:
            self._insert(key, source, entry, drops == self._drops)
        return entry.tensors

    def adopt(self, tensor: torch.Tensor, kind: EntryKind, tensors: Sequence[torch.Tensor]) -> bool:
        """See :class:`CastStore`."""
        weight = weight_of(tensor, for_prepacking=isinstance(kind, int))
        if weight is None:
            return False
        source = Source(tensor, weight, holders=1 if tensor is weight else 2)
        key = (id(weight), kind, source.layout)
        with self._lock:
            stamp, storage = version_stamp(tensor), track(tensor)
            self._insert(key, source, Entry(stamp, storage, tuple(tensors) or None), self._admits(source), is_new=False)
            return key in self._entries

    def entries(self) -> list[StoredEntry]:
        """Return the valid entries."""
        with self._lock:
            found = [self._stored(key, entry) for key, entry in _items(self._entries)]
        return [each for each in found if each is not None]

    def _stored(self, key: Key, entry: Entry) -> StoredEntry | None:
        reference = self._weights.get(key[0])
        weight = None if reference is None else reference()
        if weight is None:
            return None
        if not key[2]:
            return StoredEntry(weight, None, key[1], entry.tensors or ()) if entry.matches(weight) else None
        offset, sizes, strides = key[2]
        if not entry.matches(weight.detach().as_strided(sizes, strides, offset)):
            return None
        return StoredEntry(
            weight, (tuple(sizes), strides, offset - weight.storage_offset()), key[1], entry.tensors or ()
        )

    def cast_with_history(self, weight: torch.Tensor, dtype: torch.dtype, store: "PythonStore") -> torch.Tensor:
        """Return the cast in `store`, with the history that all its uses in this thread's regions share."""
        key = (id(weight), dtype, ())
        with self._lock:
            entry = self._with_history.get(key)
            fits = entry is not None and (entry.sees_all_writes or store._of_region) and entry.matches(weight)
            recorded = entry.cast if entry is not None and fits else None
            drops = self._drops
        stamp, storage = version_stamp(weight), track(weight)  # before the store casts
        source = Source(weight, weight)
        admitted = store._admits(source)
        sees_all_writes = not (has_other_holders(weight) or modes_may_write())
        cast = store.cast(source, dtype)
        if recorded is not None:
            return recorded
        entry = Entry(stamp, storage, (with_history(weight, cast),), sees_all_writes=sees_all_writes)
        with self._lock:
            if drops == self._drops and admitted and _is_plain(cast, dtype):
                self._with_history[key] = entry
        return entry.cast

    def _as_torch(self, source: Source) -> bool:
        """Return whether torch's own regions would cache the cast too, whatever is written.

        They cache casts of weights that require grad. Casts of other weights and of views need all writes to be seen.
        """
        return self._of_region and source.weight.requires_grad and source.holders == 1

    def _admits(self, source: Source) -> bool:
        """Return whether a cast that is made now may be cached: not where its weight may be written unseen."""
        tensor = source.tensor
        # Before `storage` below becomes another holder.
        has_others, sees_all_writes = has_other_holders(tensor, source.holders), _sees_all_writes(source)
        storage = TensorBase.untyped_storage(tensor)
        if (tensor.device.type == "cpu" and storage.is_shared()) or may_be_written(storage._cdata):
            return False
        if self._of_region:
            return sees_all_writes or (self._as_torch(source) and not (has_others and storages_are_rewritten()))
        return not has_others

    def _find(self, key: Key, source: Source) -> Entry | None:
        entry = self._entries.get(key)
        if entry is None or not entry.matches(source.tensor):
            return None
        self._hits += 1
        return entry

    def _insert(self, key: Key, source: Source, entry: Entry, admitted: bool, is_new: bool = True) -> None:
        weight = source.weight
        self._misses += is_new
        self._erase(key)
        if not admitted or (modes_may_write() and not self._of_region):
            return
        if (key[2] and not self._views_fit(weight, entry.nbytes)) or not self._has_room(entry.nbytes):
            return
        if key[0] not in self._weights:
            self._weights[key[0]] = weakref.ref(weight, self._forgetting(key[0]))
        self._entries[key] = entry
        self._bytes += entry.nbytes

    def _has_room(self, size: int) -> bool:
        return self._max_bytes is None or self._bytes + size <= self._max_bytes

    def _views_fit(self, weight: torch.Tensor, size: int) -> bool:
        """Return whether so many bytes may be added for views of a weight: together no more than the weight takes.

        Parts that do not overlap fit, in any dtype. Where each call takes another slice, caching would be of no use.
        """
        views = [(key, entry) for key, entry in _items(self._entries) if key[0] == id(weight) and key[2]]
        held = sum(entry.nbytes for _, entry in views)
        for key, entry in views if held + size > weight.nbytes else ():
            if entry.stamp[:2] != version_stamp(weight)[:2]:  # it has another version or storage by now
                held -= entry.nbytes
                self._erase(key)
        return held + size <= weight.nbytes

    def _forgetting(self, identity: int) -> Any:
        this = weakref.ref(self)

        def forget(_: object) -> None:
            store = this()
            if store is not None:
                store._forget(identity)

        return forget

    def _erase(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry.nbytes

    def invalidate(self, storages: Set[int]) -> None:
        """Drop the casts of weights in storages that were written."""
        with self._lock:
            for key in [key for key, entry in _items(self._entries) if entry.stamp[1] in storages]:
                self._erase(key)
            written = [key for key, entry in _items(self._with_history) if entry.stamp[1] in storages]
            dropped = [self._with_history.pop(key, None) for key in written]
            self._drops += 1
        del dropped

    def invalidate_all(self) -> None:
        """Drop all casts but those that torch would keep, whatever is written: a region keeps them as such."""
        with self._lock:
            for key, entry in [*_items(self._entries), *_items(self._with_history)]:
                entry.sees_all_writes = False
                if not self._of_region:
                    self._erase(key)
            self._drops += 1

    def forget(self, weight: torch.Tensor) -> None:
        """Drop the entries of a weight, and the reference to it."""
        with self._lock:
            dropped = [self._with_history.pop(key, None) for key in list(self._with_history) if key[0] == id(weight)]
            self._forget(id(weight))
        del dropped

    def _forget(self, identity: int) -> None:
        with self._lock:
            for key in [key for key in list(self._entries) if key[0] == identity]:
                self._erase(key)
            self._weights.pop(identity, None)

    def clear(self) -> None:
        """Drop all entries, and what threads made of those of a user's store for their graphs."""
        with self._lock:
            # A cast with history may hold the last reference to its weight, whose death calls forget(). So the dicts
            # are replaced, and freed when this is done.
            dropped = self._entries, self._weights, self._with_history
            self._entries, self._weights, self._with_history = {}, {}, {}
            self._bytes = 0
            self._drops += 1
        del dropped
        if not self._of_region:
            for store in all_stores():
                if isinstance(store, PythonStore):
                    store._drop_casts_with_history()

    def _drop_casts_with_history(self) -> None:
        with self._lock:
            dropped, self._with_history = self._with_history, {}
            self._drops += 1
        del dropped

    def statistics(self) -> tuple[int, ...]:
        """Return the fields of WeightCacheStats."""
        with self._lock:
            entries = _items(self._entries)
            prepacked = [entry.nbytes for (_, kind, _), entry in entries if isinstance(kind, int)]
            casts = [entry.nbytes for (_, kind, _), entry in entries if not isinstance(kind, int)]
            evictions = 0
            return len(casts), sum(casts), self._hits, self._misses, evictions, len(prepacked), sum(prepacked)


def _make_cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be saved for backward
        return weight.to(dtype)


def _is_plain(cast: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a cast is as it was made, and no dispatch mode has replaced it."""
    return type(cast) is torch.Tensor and cast.dtype is dtype


def _sees_all_writes(source: Source) -> bool:
    """Return whether nothing else holds a weight's memory, it is not that of an array, and no mode may write it."""
    if has_other_holders(source.tensor, source.holders) or modes_may_write():
        return False
    return not source.tensor.is_cpu or bool(TensorBase.untyped_storage(source.tensor).resizable())


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())
