"""The reference engine's store of kept casts."""

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...errors import StaleWeightError
from ..weights import STALE


@dataclass(slots=True)
class _Entry:
    content: tuple[object, ...]
    storage: StorageWeakRef  # so that its identity is not given to another storage
    cast: torch.Tensor
    linked: torch.Tensor | None = None


class PythonStore:
    """The reference engine's store of casts."""

    def __init__(self, max_bytes: int | None = None, verify: bool = False, own: bool = False) -> None:
        self._own = own
        self._max_bytes = max_bytes
        self._verify = verify
        # Reentrant: a weight may die, and its entries with it, in the middle of any line below.
        self._lock = threading.RLock()
        self._entries: OrderedDict[tuple[int, torch.dtype], _Entry] = OrderedDict()
        self._weights: dict[int, weakref.ref[torch.Tensor]] = {}
        self._bytes = self._hits = self._misses = self._evictions = 0

    def cast(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return `weight` in `dtype`: a kept cast if it still holds, else a new one, which is kept."""
        link = weight.requires_grad and torch.is_grad_enabled()
        key = (id(weight), dtype)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.content == _content(weight):
                self._hits += 1
                self._entries.move_to_end(key)
                if self._verify:
                    _check_contents(weight, entry.cast)
            else:
                entry = self._insert(key, weight)
            if not link:
                return entry.cast
            linked = entry.linked
            if linked is None:
                linked = _link(weight, entry.cast)
                if self._own:  # a user's store must not hold it, for it holds the weight
                    entry.linked = linked
            return linked

    def _insert(self, key: tuple[int, torch.dtype], weight: torch.Tensor) -> _Entry:
        content, storage = _content(weight), StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
        with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be saved for a backward
            cast = weight.detach().to(key[1])
        entry = _Entry(content, storage, cast)
        self._misses += 1
        self._erase(key)
        if self._max_bytes is not None and cast.nbytes > self._max_bytes:
            return entry
        if key[0] not in self._weights:
            self._weights[key[0]] = weakref.ref(weight, self._forgetting(key[0]))
        self._entries[key] = entry
        self._bytes += cast.nbytes
        while self._max_bytes is not None and self._bytes > self._max_bytes:
            self._erase(next(iter(self._entries)))
            self._evictions += 1
        return entry

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

    def _erase(self, key: tuple[int, torch.dtype]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry.cast.nbytes

    def clear(self) -> None:
        """Drop every cast."""
        with self._lock:
            # A cast with history may be the last that holds its weight, whose end then comes to `forget`: to dicts that
            # are whole, so these are let go of when this is done.
            dropped = self._entries, self._weights
            self._entries, self._weights = OrderedDict(), {}
            self._bytes = 0
        del dropped

    def statistics(self) -> tuple[int, int, int, int, int]:
        """Return entries, bytes, hits, misses and evictions."""
        with self._lock:
            return len(self._entries), self._bytes, self._hits, self._misses, self._evictions


def _content(weight: torch.Tensor) -> tuple[object, ...]:
    """Return what tells that a weight is what it was: its version, its memory, and how it lies there."""
    storage = weight.untyped_storage()
    return weight._version, storage._cdata, weight.data_ptr(), weight.shape, weight.stride()


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
        fresh = weight.detach().to(cast.dtype)
        if not (torch.equal(fresh.nan_to_num(), cast.nan_to_num()) and torch.equal(fresh.isnan(), cast.isnan())):
            raise StaleWeightError(STALE)
