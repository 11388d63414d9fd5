"""The reference engine's stores of cached casts."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import StaleWeightError
from ..casts.cached_cast import with_history
from ..casts.cast_cache import EntryKind, StoredEntry
from ..casts.weights import STALE, Source, TensorBase, has_other_holders, storages_are_rewritten, weight_of
from ..recipes.prepacking import NO_ROOM, VIEWS_ARE_FULL, WRITTEN_UNSEEN
from .invalidation import (
    add_store,
    all_stores,
    last_write,
    last_write_of_all,
    may_be_written,
    modes_may_write,
    read,
    reserve,
)

Prepacked: TypeAlias = tuple[torch.Tensor, ...] | None
_Key: TypeAlias = tuple[EntryKind, tuple[Any, ...]]
"""The kind of an entry, and the layout of the view that it was made of: () for the weight itself."""


class Stamp(NamedTuple):
    """The state of a weight, which is another one once the weight was written or moved."""

    version: int
    storage: int
    last_write: int
    address: int
    layout: tuple[Any, ...]
    stream: object
    """The current stream: others do not use the cast."""


def stamp_of(weight: torch.Tensor) -> Stamp:
    """Return the stamp of a weight."""
    storage, address = TensorBase.untyped_storage(weight)._cdata, TensorBase.data_ptr(weight)
    layout = weight.shape, weight.stride()
    return Stamp(weight._version, storage, last_write(storage), address, layout, _stream(weight))


def _stream(weight: torch.Tensor) -> object:
    accelerator = None if weight.is_cpu else torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != weight.device.type:
        return None
    return torch.accelerator.current_stream(weight.device.index)


@dataclass(slots=True)
class Entry:
    """A cast or a prepacked weight, which is valid while the weight has its stamp, and nothing writes to the cast."""

    stamp: Stamp
    storage: StorageWeakRef
    last_write_of_all: int
    tensors: Prepacked = None
    versions: tuple[int, ...] = ()
    is_only_holder: bool = True  # nothing else held the weight's memory
    original: torch.Tensor | None = None  # if a prepacked weight is to be verified, a copy of the weight

    @classmethod
    def of(cls, weight: torch.Tensor) -> "Entry":
        """Return an entry to which tensors are added when they are made of the weight."""
        return cls(stamp_of(weight), reserve(TensorBase.untyped_storage(weight)), last_write_of_all())

    def add(self, tensors: Prepacked) -> None:
        """Add what was made of the weight."""
        self.tensors, self.versions = tensors, _versions(tensors)

    @property
    def cast(self) -> torch.Tensor:
        """The cast."""
        assert self.tensors is not None
        return self.tensors[0]

    @property
    def nbytes(self) -> int:
        """The memory that the tensors take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors or ())

    @property
    def sees_all_writes(self) -> bool:
        """Whether nothing may have written the weight unseen."""
        return self.is_only_holder and self.last_write_of_all == last_write_of_all()

    def is_unwritten(self) -> bool:
        """Return whether no write was noted that changes no version."""
        return (self.stamp.last_write, self.last_write_of_all) == (last_write(self.stamp.storage), last_write_of_all())

    def matches(self, weight: torch.Tensor) -> bool:
        """Return whether the weight is unchanged, and nothing has written to the cast."""
        return self.versions == _versions(self.tensors) and self.stamp == stamp_of(weight)


def _versions(tensors: Prepacked) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors or ())


class PythonStore:
    """A store of casts. An entry for which there is no room is not cached; none is evicted.

    Args:
        max_bytes: as in WeightCache.
        verify: as in WeightCache.
        of_region: whether it is the store of a thread's regions, which also has the casts with autograd history. It
            keeps what torch would keep, whatever is written.
    """

    def __init__(self, max_bytes: int | None = None, verify: bool = False, of_region: bool = False) -> None:
        self._of_region = of_region
        self._max_bytes = max_bytes
        self._verify = verify
        # Reentrant: the garbage collector may run in any line below, and leave a region.
        self.lock = threading.RLock()
        self._entries: Any = WeakIdKeyDictionary()  # by weight, a dict of its entries by key
        self._with_history: Any = WeakIdKeyDictionary()  # by weight, a dict of casts with history by dtype
        self._hits = self._misses = 0
        add_store(self)

    def cast(self, source: Source, dtype: torch.dtype) -> torch.Tensor:
        """Return a weight or a view in `dtype`, without history: the cached cast, or a new one."""
        tensor, key = source.tensor, (dtype, source.layout)
        sees_all_writes = _sees_all_writes(source)
        with self.lock:
            entry = self._find(source, key)
            if entry is None:
                entry = Entry.of(tensor)  # before the cast is made
                admitted = self._admits(source)
                entry.add((_make_cast(tensor, dtype),))
                entry.is_only_holder = sees_all_writes
                self._insert(source, key, entry, admitted and _is_plain(entry.cast, dtype))
            elif self._of_region and not (sees_all_writes and entry.sees_all_writes) and not self._as_torch(source):
                return _make_cast(tensor, dtype)
            elif self._verify and not _are_equal(tensor.detach().to(dtype), entry.cast):
                raise StaleWeightError(STALE)
            return entry.cast

    def prepacked(
        self, source: Source, prepack_id: int, prepack: Callable[[torch.Tensor], Prepacked]
    ) -> Prepacked | str:
        """Return the cached prepacked weight, or a new one by `prepack`.

        If it could not be cached it is not made, since that is more work than it saves: then return the reason.
        """
        tensor, key = source.tensor, (prepack_id, source.layout)
        with self.lock:
            entry = self._find(source, key)
            if entry is not None:
                if entry.original is not None and not _are_equal(entry.original, tensor):
                    raise StaleWeightError(STALE)
                return entry.tensors
            if not self._admits(source):
                return WRITTEN_UNSEEN
            if source.layout and not self._views_fit(source.weight, tensor.numel()):
                return VIEWS_ARE_FULL
            self._erase(source.weight, key)
            if not self._has_room(tensor.numel()):  # the least that it takes
                return NO_ROOM
            entries = self._entries
        entry = Entry.of(tensor)
        if not self._admits(source):
            return WRITTEN_UNSEEN
        entry.add(read(tensor, lambda: prepack(tensor)))
        if self._verify:
            with torch.no_grad():
                entry.original = tensor.detach().clone()
        with self.lock:
            self._insert(source, key, entry, entries is self._entries)  # it was not cleared meanwhile
        return entry.tensors

    def adopt(self, tensor: torch.Tensor, kind: EntryKind, tensors: Sequence[torch.Tensor]) -> bool:
        """See :class:`CastStore`."""
        weight = weight_of(tensor, for_prepacking=isinstance(kind, int))
        if weight is None:
            return False
        source = Source(tensor, weight, holders=1 if tensor is weight else 2)
        key = (kind, source.layout)
        with self.lock:
            entry = Entry.of(tensor)
            entry.add(tuple(tensors) or None)
            self._insert(source, key, entry, self._admits(source), is_new=False)
            return key in self._entries.get(weight, {})

    def entries(self) -> list[StoredEntry]:
        """Return the valid entries."""
        with self.lock:
            found = []
            for weight, (kind, layout), entry in self._items():
                made_of, view = weight, None
                if layout:
                    offset, sizes, strides = layout
                    made_of = weight.detach().as_strided(sizes, strides, offset)
                    view = (tuple(sizes), strides, offset - weight.storage_offset())
                if entry.matches(made_of):
                    found.append(StoredEntry(weight, view, kind, entry.tensors or ()))
            return found

    def cast_with_history(self, weight: torch.Tensor, dtype: torch.dtype, store: "PythonStore") -> torch.Tensor:
        """Return the cast in `store`, with the history that all its uses in this thread's regions share."""
        with self.lock:
            casts = self._with_history
            found: Entry | None = casts.get(weight, {}).get(dtype)
            if found is not None and not ((found.sees_all_writes or store._of_region) and found.matches(weight)):
                found = None
        entry, source = Entry.of(weight), Source(weight, weight)  # before the store casts
        admitted = store._admits(source)
        entry.is_only_holder = not (has_other_holders(weight) or modes_may_write())
        cast = store.cast(source, dtype)
        if found is not None:
            return found.cast
        entry.add((with_history(weight, cast),))
        with self.lock:
            if casts is self._with_history and admitted and _is_plain(cast, dtype):
                casts.setdefault(weight, {})[dtype] = entry
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

    def _find(self, source: Source, key: _Key) -> Entry | None:
        entry: Entry | None = self._entries.get(source.weight, {}).get(key)
        if entry is None or not entry.matches(source.tensor):
            return None
        if not self._of_region and entry.last_write_of_all != last_write_of_all():
            return None
        self._hits += 1
        return entry

    def _insert(self, source: Source, key: _Key, entry: Entry, admitted: bool, is_new: bool = True) -> None:
        self._misses += is_new
        self._erase(source.weight, key)
        if not admitted or (modes_may_write() and not self._of_region):
            return
        if key[1] and not self._views_fit(source.weight, entry.nbytes):
            return
        if self._has_room(entry.nbytes):
            self._entries.setdefault(source.weight, {})[key] = entry

    def _erase(self, weight: torch.Tensor, key: _Key) -> None:
        self._entries.get(weight, {}).pop(key, None)

    def _items(self) -> list[tuple[torch.Tensor, _Key, Entry]]:
        """Return weights, keys and entries; drop entries that a write without a new version has invalidated."""
        found = []
        for weight, of_weight in list(self._entries.items()):
            for key, entry in of_weight.copy().items():
                if entry.is_unwritten():
                    found.append((weight, key, entry))
                else:
                    self._erase(weight, key)
        return found

    def _has_room(self, size: int) -> bool:
        held = 0 if self._max_bytes is None else sum(entry.nbytes for *_, entry in self._items())
        return self._max_bytes is None or held + size <= self._max_bytes

    def _views_fit(self, weight: torch.Tensor, size: int) -> bool:
        """Return whether so many bytes may be added for views of a weight: together no more than the weight takes.

        Parts that do not overlap fit, in any dtype. Where each call takes another slice, caching would be of no use.
        """
        of_weight: dict[_Key, Entry] = self._entries.get(weight, {})
        current = stamp_of(weight)
        for key, entry in of_weight.copy().items():
            if key[1] and entry.stamp[:3] != current[:3]:  # the weight was written or moved
                del of_weight[key]
        return sum(entry.nbytes for key, entry in of_weight.items() if key[1]) + size <= weight.nbytes

    def forget(self, weight: torch.Tensor) -> None:
        """Drop the entries of a weight, and the reference to it."""
        with self.lock:
            dropped = self._entries.pop(weight, None), self._with_history.pop(weight, None)
        del dropped

    def clear(self) -> None:
        """Drop all entries, and what threads made of those of a user's store for their graphs."""
        with self.lock:
            self._entries, dropped = WeakIdKeyDictionary(), self._entries
        del dropped
        for store in [self] if self._of_region else all_stores():
            store.drop_casts_with_history()

    def drop_casts_with_history(self) -> None:
        """Drop the casts with autograd history."""
        with self.lock:
            self._with_history, dropped = WeakIdKeyDictionary(), self._with_history
        del dropped

    def statistics(self) -> tuple[int, ...]:
        """Return the fields of WeightCacheStats."""
        with self.lock:
            entries = [(kind, entry.nbytes) for _, (kind, _), entry in self._items()]
            prepacked = [nbytes for kind, nbytes in entries if isinstance(kind, int)]
            casts = [nbytes for kind, nbytes in entries if not isinstance(kind, int)]
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
