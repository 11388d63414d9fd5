"""The reference engine's store of kept casts."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...errors import StaleWeightError
from ...plugins.fork import Lock, hold_over_forks
from ..state import NO_ROOM, WRITTEN_UNSEEN
from ..weights import STALE, is_part_of_a_buffer

_MOST_USES = 3
_USES_TO_REPACK = 16
"""A packing takes as long as so many uses of it save."""
_MOST_REFUSED = 10_000
_stores: "weakref.WeakSet[PythonStore]" = weakref.WeakSet()
_stores_lock = threading.RLock()


_Key: TypeAlias = tuple[int, torch.dtype | int]
"""Of a weight: its identity, and the dtype of its cast or the kind of its packing."""
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

    def cast(self, weight: torch.Tensor, dtype: torch.dtype, made: list[bool] | None = None) -> torch.Tensor:
        """Return `weight` in `dtype`, without history: a kept cast if it still holds, else a new one, which is kept.

        The list `made` gets an item where it is a new one.
        """
        key = (id(weight), dtype)
        with self._lock:
            entry = self._find(key, weight)
            if entry is None:
                if made is not None:
                    made.append(True)
                return self._insert(
                    key, weight, _Entry(_content(weight), _storage(weight), (_made(weight, dtype),))
                ).cast
            if self._verify:
                _check_contents(weight, entry.cast)
            return entry.cast

    def packing(self, weight: torch.Tensor, kind: int, prepare: Callable[[torch.Tensor], _Packing]) -> _Packing | str:
        """Return what `prepare` makes of a weight: what is kept if it still holds, else anew.

        Where it could not be kept it is not made, for that is more work than it saves: then return the reason.
        """
        key = (id(weight), kind)
        with self._lock:
            entry = self._find(key, weight)
            if entry is not None:
                if entry.original is not None and not _are_equal(entry.original, weight):
                    raise StaleWeightError(STALE)
                return entry.kept
            if not self._may_keep(weight):
                return WRITTEN_UNSEEN
            # One that had no room has left its size; one that was never made takes a byte for each element, at least.
            self._erase(key)
            refused = self._refused.get(key)
            known = refused.nbytes if refused is not None and refused.elements == weight.numel() else 0
            if not self._has_room(key, weight.numel(), max(weight.numel(), known)):
                return NO_ROOM
        content = _content(weight)
        entry = _Entry(content, _storage(weight), prepare(weight))
        if self._verify:
            with torch.no_grad():
                entry.original = weight.detach().clone()
        with self._lock:
            return self._insert(key, weight, entry).kept

    def _find(self, key: _Key, weight: torch.Tensor) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is None or not entry.holds_for(weight):
            return None
        self._hits += 1
        entry.uses = min(entry.uses + 1, _MOST_USES)
        entry.last_use = self._tick()
        self._entries.move_to_end(key)
        return entry

    def with_link(
        self, weight: torch.Tensor, dtype: torch.dtype, store: "PythonStore", made: list[bool] | None
    ) -> torch.Tensor:
        """Return the cast that `store` keeps, with the history that all its uses in this thread's regions have."""
        key = (id(weight), dtype)
        with self._lock:
            entry = self._linked.get(key)
            linked = entry.cast if entry is not None and entry.holds_for(weight) else None
            drops = self._drops
        content, storage = _content(weight), _storage(weight)  # what is written from here on need not be in the cast
        cast = store.cast(weight, dtype, made)
        if linked is not None:
            return linked
        entry = _Entry(content, storage, (_link(weight, cast),))
        with self._lock:
            if drops == self._drops and _may_be_kept(weight):
                self._linked[key] = entry
        return entry.cast

    def _insert(self, key: _Key, weight: torch.Tensor, entry: _Entry) -> _Entry:
        self._misses += 1
        self._erase(key)
        if not self._may_keep(weight):
            return entry
        if not self._has_room(key, weight.numel(), entry.nbytes):
            if isinstance(key[1], int):
                self._refused_of(key, weight.numel()).nbytes = entry.nbytes
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

    def _may_keep(self, weight: torch.Tensor) -> bool:
        return _may_be_kept(weight) and (self._own or not is_part_of_a_buffer(weight))

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
        for longest_unused, oldest in list(self._entries.items()):  # weights may die meanwhile
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
                    for key in [key for key in store._entries if key[0] == identity]:
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
            for key in [key for key, entry in self._entries.items() if entry.content[1] in storages]:
                self._erase(key)
            written = [key for key, entry in self._linked.items() if entry.content[1] in storages]
            dropped = [self._linked.pop(key) for key in written]
            self._drops += 1
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
            packed = [entry.nbytes for (_, kind), entry in self._entries.items() if isinstance(kind, int)]
            casts, size = len(self._entries) - len(packed), self._bytes - sum(packed)
            return casts, size, self._hits, self._misses, self._evictions, len(packed), sum(packed)


def all_stores() -> list[PythonStore]:
    """Return the stores that are alive."""
    with _stores_lock:
        return list(_stores)


def _locks() -> list[Lock]:
    return [_stores_lock, *(store._lock for store in all_stores())]


hold_over_forks(_locks)


_written_later: dict[int, StorageWeakRef] = {}


def note_writes(tensors: Iterable[torch.Tensor], may_go_on: bool = False) -> None:
    """Drop the casts of weights that were written without a version, and keep none where that `may_go_on`."""
    written = {
        storage._cdata: StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        for storage in (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided)
    }
    if may_go_on:
        with _stores_lock:
            for storage in [storage for storage, reference in _written_later.items() if _is_gone(reference)]:
                del _written_later[storage]
            _written_later.update(written)
    for store in all_stores():
        store.forget_written(written.keys())


def _is_gone(reference: StorageWeakRef) -> bool:
    return bool(reference.expired())  # type: ignore[no-untyped-call]


def _may_be_kept(weight: torch.Tensor) -> bool:
    """Say whether the cast of a weight may be kept: not where others write its memory, at times that nobody tells."""
    shared = weight.device.type == "cpu" and weight.is_shared()  # type: ignore[no-untyped-call]
    return not shared and weight.untyped_storage()._cdata not in _written_later


def _made(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be saved for a backward
        return weight.detach().to(dtype)


def _storage(weight: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]


def _content(weight: torch.Tensor) -> tuple[object, ...]:
    """Return what tells that a weight is what it was: its version, its memory, and how it lies there.

    And on which stream: nobody says when a cast that was made on another may be used.
    """
    storage = weight.untyped_storage()
    return weight._version, storage._cdata, weight.data_ptr(), weight.shape, weight.stride(), _stream(weight)


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


def _link(weight: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
    linked: torch.Tensor = _Linked.apply(weight, cast)  # type: ignore[no-untyped-call]
    return linked


def _check_contents(weight: torch.Tensor, cast: torch.Tensor) -> None:
    with torch.no_grad():
        if not _are_equal(weight.detach().to(cast.dtype), cast):
            raise StaleWeightError(STALE)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())
