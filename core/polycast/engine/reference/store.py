"""The reference engine's store of kept casts."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...common.atfork import Lock, hold_during_fork
from ...errors import StaleWeightError
from ...torch_internals.names import has_storage, without_torch_function
from ..casts.not_prepacked import NO_ROOM, VIEWS_ARE_FULL, WRITTEN_UNSEEN
from ..casts.weights import STALE, Source, TensorBase, has_other_holders, storages_are_rewritten

_MOST_USES = 3
_USES_TO_REPACK = 16
"""A packing takes as long as so many uses of it save."""
_MOST_REFUSED = 10_000
_stores: "weakref.WeakSet[PythonStore]" = weakref.WeakSet()
_stores_lock = threading.RLock()


_Key: TypeAlias = tuple[int, torch.dtype | int, tuple[object, ...]]
"""The identity of a weight, the dtype of its cast or the kind of its packing, and, of a view of it, where that lies."""
_Packing: TypeAlias = tuple[torch.Tensor, ...] | None


@dataclass(slots=True)
class _Entry:
    content: tuple[object, ...]
    storage: StorageWeakRef  # so that its identity is not given to another storage
    kept: _Packing  # a cast, or what the weight was packed into
    uses: int = 1
    last_use: int = 0  # by the store's clock
    versions: tuple[int, ...] = ()
    nbytes: int = 0
    original: torch.Tensor | None = None  # what was packed, where it is to be verified
    alone: bool = True  # whether the weight had its memory alone

    def __post_init__(self) -> None:
        self.versions = _versions(self.kept)
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in self.kept or ())

    def holds_for(self, weight: torch.Tensor) -> bool:
        # What an op that declares no writes does to its inputs, or who is given one back, it does to the cast.
        return self.versions == _versions(self.kept) and self.content == _content(weight)

    @property
    def cast(self) -> torch.Tensor:
        assert self.kept is not None
        return self.kept[0]


@dataclass(slots=True)
class _Refused:
    """What was not given room: a hint, by identity."""

    elements: int  # of the weight
    nbytes: int = 0  # of what was made of it; 0: nothing was
    count: int = 0  # how often, since `since` by the store's clock
    since: int = 0


def _listed(entries: Mapping[_Key, _Entry]) -> list[tuple[_Key, _Entry]]:
    """Return a mapping's items, to be walked while weights die and their entries with them.

    The garbage collector may run wherever an object is made. Listing the keys makes none, listing the items does.
    """
    keys = list(entries)
    return [(key, entry) for key in keys if (entry := entries.get(key)) is not None]


def _versions(kept: _Packing) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in kept or ())


class PythonStore:
    """A store of casts: a user's, or (`own`) that of a thread's regions, which has the casts with history too."""

    def __init__(self, max_bytes: int | None = None, verify: bool = False, own: bool = False) -> None:
        self._own = own
        self._max_bytes = max_bytes
        self._verify = verify
        # Reentrant: a weight may die, and its entries with it, in the middle of any line below.
        self._lock = threading.RLock()
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._linked: dict[_Key, _Entry] = {}
        self._drops = 0  # how often some of these were dropped
        self._weights: dict[int, weakref.ref[torch.Tensor]] = {}
        self._refused: dict[_Key, _Refused] = {}
        self._clock = 0
        self._bytes = self._hits = self._misses = self._evictions = 0
        with _stores_lock:
            _stores.add(self)

    def cast(self, source: Source, dtype: torch.dtype) -> torch.Tensor:
        """Return a weight or a view in `dtype`, without history: the kept cast if it still holds, else a new one."""
        weight = source.tensor
        key = (id(source.weight), dtype, source.layout)
        alone = _is_alone(source)
        with self._lock:
            entry = self._find(key, source)
            if self._own and entry is not None and not (alone and entry.alone) and not self._as_torch(source):
                return _made(weight, dtype)
            if entry is None:
                content, storage = _content(weight), _storage(weight)
                may_keep = self._may_keep(source)
                entry = _Entry(content, storage, (_made(weight, dtype),), alone=alone)
                return self._insert(key, source, entry, may_keep).cast
            if self._verify:
                _check_contents(weight, entry.cast)
            return entry.cast

    def prepacked(self, source: Source, kind: int, prepare: Callable[[torch.Tensor], _Packing]) -> _Packing | str:
        """Return what `prepare` makes of a weight or a view: what is kept if it holds, else anew.

        Where it could not be kept it is not made, for that is more work than it saves: then return the reason.
        """
        weight = source.tensor
        key = (id(source.weight), kind, source.layout)
        with self._lock:
            entry = self._find(key, source)
            if entry is not None:
                if entry.original is not None and not _are_equal(entry.original, weight):
                    raise StaleWeightError(STALE)
                return entry.kept
            if not self._may_keep(source):
                return WRITTEN_UNSEEN
            # One that was refused has left its size; one that was never made takes a byte for each element, at least.
            refused = self._refused.get(key)
            known = refused.nbytes if refused is not None and refused.elements == weight.numel() else 0
            size = max(weight.numel(), known)
            if source.layout and not self._views_fit(source.weight, size):
                return VIEWS_ARE_FULL
            self._erase(key)
            if not self._has_room(key, weight.numel(), size):
                return NO_ROOM
            drops = self._drops
        content, storage = _content(weight), _storage(weight)
        if not self._may_keep(source):
            return WRITTEN_UNSEEN
        outer, _thread.only_reads = _thread.only_reads, _thread.only_reads | {TensorBase.untyped_storage(weight)._cdata}
        try:
            entry = _Entry(content, storage, prepare(weight))
        finally:
            _thread.only_reads = outer
        if self._verify:
            with torch.no_grad():
                entry.original = weight.detach().clone()
        with self._lock:
            return self._insert(key, source, entry, drops == self._drops).kept

    def _find(self, key: _Key, source: Source) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is None or not entry.holds_for(source.tensor):
            return None
        self._hits += 1
        entry.uses = min(entry.uses + 1, _MOST_USES)
        entry.last_use = self._tick()
        self._entries.move_to_end(key)
        return entry

    def with_link(self, weight: torch.Tensor, dtype: torch.dtype, store: "PythonStore") -> torch.Tensor:
        """Return the cast that `store` keeps, with the history that all its uses in this thread's regions have."""
        key = (id(weight), dtype, ())
        with self._lock:
            entry = self._linked.get(key)
            fits = entry is not None and (entry.alone or store._own) and entry.holds_for(weight)
            linked = entry.cast if entry is not None and fits else None
            drops = self._drops
        content, storage = _content(weight), _storage(weight)  # what is written from here on need not be in the cast
        source = Source(weight, weight)
        may_keep, alone = store._may_keep(source), not has_other_holders(weight)
        cast = store.cast(source, dtype)
        if linked is not None:
            return linked
        entry = _Entry(content, storage, (with_history(weight, cast),), alone=alone)
        with self._lock:
            if drops == self._drops and may_keep:
                self._linked[key] = entry
        return entry.cast

    def _as_torch(self, source: Source) -> bool:
        """Return whether torch's own regions keep a cast too: of a weight that requires grad, whatever is written.

        Of others, and of views, they keep none, so that every write is seen.
        """
        return self._own and source.weight.requires_grad and source.holders == 1

    def _may_keep(self, source: Source) -> bool:
        """Return whether a cast that is made now may be kept: not where its weight may be written unseen."""
        weight = source.tensor
        # Asked before it has one more, here.
        has_others, alone = has_other_holders(weight, source.holders), _is_alone(source)
        storage = TensorBase.untyped_storage(weight)
        if (weight.device.type == "cpu" and storage.is_shared()) or storage._cdata in _written_later:
            return False
        if self._own:
            return alone or (self._as_torch(source) and not (has_others and storages_are_rewritten()))
        return not has_others

    def _insert(self, key: _Key, source: Source, entry: _Entry, may_keep: bool) -> _Entry:
        weight, elements = source.weight, source.tensor.numel()
        self._misses += 1
        self._erase(key)
        if not may_keep:
            return entry
        views_fit = not key[2] or self._views_fit(weight, entry.nbytes)
        if not self._has_room(key, elements, entry.nbytes) or not views_fit:
            if isinstance(key[1], int):
                self._refused_of(key, elements).nbytes = entry.nbytes
            return entry
        while self._max_bytes is not None and self._bytes + entry.nbytes > self._max_bytes:
            self._erase(next(iter(self._entries)))
            self._evictions += 1
        self._refused.pop(key, None)
        entry.last_use = self._tick()
        if key[0] not in self._weights:
            self._weights[key[0]] = weakref.ref(weight, self._forgetting(key[0]))
        self._entries[key] = entry
        self._bytes += entry.nbytes
        return entry

    def _views_fit(self, weight: torch.Tensor, size: int) -> bool:
        """Return whether the views of a weight may take so much memory more: together no more than the weight does.

        The parts of a weight fit, in any dtype. Where each call takes another slice, what was kept would be of no use.
        """
        views = [(key, entry) for key, entry in _listed(self._entries) if key[0] == id(weight) and key[2]]
        kept = sum(entry.nbytes for _, entry in views)
        for key, entry in views if kept + size > weight.nbytes else ():
            if entry.content[:2] != _content(weight)[:2]:  # it was written, or given other memory, since
                kept -= entry.nbytes
                self._erase(key)
        return kept + size <= weight.nbytes

    def _has_room(self, key: _Key, elements: int, size: int) -> bool:
        """Return whether a new entry may have so many bytes, in place of those that were not used for longest.

        Those give way if they were not used while the new one was wanted, and refused, as often as they had been, or
        often enough to be worth a packing. So a model that is too large for the store has hits on the part of it that
        is in there: each entry is used before a layer outside is wanted again, and no layer drives out the one that is
        needed next. And a model that is used no more gives way.
        """
        if self._max_bytes is None:
            return True
        if size > self._max_bytes:
            return False
        left = self._bytes
        for longest_unused, oldest in _listed(self._entries):
            if left + size <= self._max_bytes:
                break
            refused = self._refused_of(key, elements)
            if oldest.last_use > refused.since:
                refused.count, refused.since = 0, self._tick()
            is_packing = isinstance(key[1], int) or isinstance(longest_unused[1], int)
            if refused.count < (_USES_TO_REPACK if is_packing else oldest.uses):
                refused.count += 1
                return False
            left -= oldest.nbytes
        return True

    def _refused_of(self, key: _Key, elements: int) -> _Refused:
        if len(self._refused) > _MOST_REFUSED:
            self._refused.clear()
        refused = self._refused.get(key)
        if refused is None or refused.elements != elements:  # another weight, where one has died
            refused = self._refused[key] = _Refused(elements)
        return refused

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _forgetting(self, identity: int) -> Any:
        this = weakref.ref(self)

        def forget(_: object) -> None:
            store = this()
            if store is not None:
                with store._lock:
                    for key in [key for key in list(store._entries) if key[0] == identity]:
                        store._erase(key)
                    store._weights.pop(identity, None)

        return forget

    def _erase(self, key: _Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry.nbytes

    def forget_written(self, storages: Set[int]) -> None:
        """Drop the casts of weights whose storages were written."""
        with self._lock:
            for key in [key for key, entry in _listed(self._entries) if entry.content[1] in storages]:
                self._erase(key)
            written = [key for key, entry in _listed(self._linked) if entry.content[1] in storages]
            dropped = [self._linked.pop(key, None) for key in written]
            self._drops += 1
        del dropped

    def forget(self, weight: torch.Tensor) -> None:
        """Drop what is kept of a weight, and the reference to it."""
        with self._lock:
            for key in [key for key in list(self._entries) if key[0] == id(weight)]:
                self._erase(key)
            dropped = [self._linked.pop(key, None) for key in list(self._linked) if key[0] == id(weight)]
            self._weights.pop(id(weight), None)
        del dropped

    def clear(self) -> None:
        """Drop every cast, and what threads made of those of a user's store for their graphs."""
        with self._lock:
            # A cast with history may be the last that holds its weight, whose end then comes to `forget`: to dicts that
            # are whole, so these are let go of when this is done.
            dropped = self._entries, self._weights, self._linked
            self._entries, self._weights, self._linked = OrderedDict(), {}, {}
            self._bytes = 0
            self._drops += 1
        del dropped
        if not self._own:
            for store in all_stores():
                store.drop_links()

    def drop_links(self) -> None:
        """Drop the casts with history."""
        with self._lock:
            dropped, self._linked = self._linked, {}
            self._drops += 1
        del dropped

    def statistics(self) -> tuple[int, ...]:
        """See CastStore."""
        with self._lock:
            entries = _listed(self._entries)
            packed = [entry.nbytes for (_, kind, _), entry in entries if isinstance(kind, int)]
            casts = [entry.nbytes for (_, kind, _), entry in entries if not isinstance(kind, int)]
            return len(casts), sum(casts), self._hits, self._misses, self._evictions, len(packed), sum(packed)


def all_stores() -> list[PythonStore]:
    """Return the stores that are alive."""
    with _stores_lock:
        return list(_stores)


def _locks() -> list[Lock]:
    return [_stores_lock, *(store._lock for store in all_stores())]


hold_during_fork(_locks)


_written_later: dict[int, StorageWeakRef] = {}


class _Thread(threading.local):
    only_reads: frozenset[int] = frozenset()
    """The storages of weights that the thread packs, whose memory it gives to nobody who writes it."""


_thread = _Thread()
_noted: set[int] = set()
"""The storages of weights that something may be kept of, by identity; of some nothing is any more."""


def note_alias(tensor: torch.Tensor) -> None:
    """Drop the casts of weights on the memory of a tensor, which was given to what counts no versions."""
    if not _noted:
        return
    with without_torch_function():
        if has_storage(tensor):
            storage = TensorBase.untyped_storage(tensor)._cdata
            if storage in _noted and storage not in _thread.only_reads:
                note_writes([tensor])


def forget(tensors: Iterable[torch.Tensor]) -> None:
    """Let go of what the stores refer to of tensors."""
    for tensor in tensors:
        for store in all_stores():
            store.forget(tensor)


def note_writes(tensors: Iterable[torch.Tensor], may_go_on: bool = False) -> None:
    """Drop the casts of weights that were written without a version, and keep none where that `may_go_on`."""
    written = {
        storage._cdata: StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        for storage in (TensorBase.untyped_storage(tensor) for tensor in tensors if tensor.layout is torch.strided)
    }
    _noted.difference_update(written)
    if may_go_on:
        with _stores_lock:
            for storage in [storage for storage, reference in _written_later.items() if _is_gone(reference)]:
                del _written_later[storage]
            _written_later.update(written)
    for store in all_stores():
        store.forget_written(written.keys())


def _is_gone(reference: StorageWeakRef) -> bool:
    return bool(reference.expired())  # type: ignore[no-untyped-call]


def _made(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be saved for a backward
        return weight.detach().to(dtype)


def _is_alone(source: Source) -> bool:
    """Return whether nobody else holds a weight's memory, which is not that of an array either."""
    if has_other_holders(source.tensor, source.holders):
        return False
    return not source.tensor.is_cpu or bool(TensorBase.untyped_storage(source.tensor).resizable())


def _storage(weight: torch.Tensor) -> StorageWeakRef:
    storage = TensorBase.untyped_storage(weight)
    _noted.add(storage._cdata)
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _content(weight: torch.Tensor) -> tuple[object, ...]:
    """Return what tells that a weight is what it was: its version, its memory, and how it lies there.

    And on which stream: nobody says when a cast that was made on another may be used.
    """
    storage, address = TensorBase.untyped_storage(weight), TensorBase.data_ptr(weight)
    return weight._version, storage._cdata, address, weight.shape, weight.stride(), _stream(weight)


def _stream(weight: torch.Tensor) -> object:
    accelerator = None if weight.is_cpu else torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != weight.device.type:
        return None
    return torch.accelerator.current_stream(weight.device.index)


class _Linked(torch.autograd.Function):
    """A cast that was made without history, with the history that ``weight.to(dtype)`` would have."""

    @staticmethod
    def forward(weight: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
        return cast.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.dtype), None


def with_history(weight: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the memory of a cast, with the history that casting the weight or view would give it."""
    linked: torch.Tensor = _Linked.apply(weight, cast)  # type: ignore[no-untyped-call]
    return linked


def _check_contents(weight: torch.Tensor, cast: torch.Tensor) -> None:
    with torch.no_grad():
        if not _are_equal(weight.detach().to(cast.dtype), cast):
            raise StaleWeightError(STALE)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())
