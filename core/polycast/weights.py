"""The casts of weights that are kept, so that a weight that is used again is not cast again.

torch's own cache is one for the process, keyed by the tensor alone. A store here belongs to one thread, or to a user
who shares it (WeightCache). An entry holds while the weight is alive and is what it was: the same version, the same
memory. Casts to several dtypes live side by side, and a cast that was made without history serves grad mode too, on the
same memory with history.

:class:`PythonStore` is the reference engine's. native.cpp has one with the same semantics.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import Self

from .errors import StaleWeightError


@dataclass(frozen=True)
class WeightCacheStats:
    """What a WeightCache holds and has done.

    Attributes:
        entries: casts that are kept.
        bytes: their memory.
        hits: how often a kept cast served.
        misses: how often a cast was made.
        evictions: how many casts were dropped to keep within max_bytes.
    """

    entries: int
    bytes: int
    hits: int
    misses: int
    evictions: int


class CastStore(Protocol):
    """A store of casts, of either engine."""

    def clear(self) -> None:
        """Drop every cast."""

    def statistics(self) -> tuple[int, int, int, int, int]:
        """Return entries, bytes, hits, misses and evictions."""


_Store = TypeVar("_Store", bound=CastStore)


class WeightCache:
    """Casts of weights that outlive regions: inference with float32 weights at the speed of a bfloat16 model.

    Give one to any regions, on any threads. It keeps a cast until the weight changes or dies, :meth:`clear` is called,
    or the cache itself dies. Casts made under ``torch.no_grad`` and ``torch.inference_mode`` serve grad mode too.

    In-place updates (an optimizer's step, ``load_state_dict``) and a new ``weight.data = ...`` are seen. A write
    through ``.data`` (``weight.data.add_(1)``) is not: torch does not count it in the weight's version. Call
    :meth:`clear` after one; and before ``torch.utils.swap_tensors``, which refuses tensors that a cache watches.

    Args:
        max_bytes: the memory that casts may take; those least recently used are dropped first. None: no bound.
        verify: at every hit compare the cast with the weight, to find writes that were not seen. Slow.

    Raises:
        TypeError: `max_bytes` is not an int, or `verify` not a bool.
        ValueError: `max_bytes` is negative.

    Example:
        >>> import torch, polycast
        >>> model, cache = torch.nn.Linear(8, 8), polycast.WeightCache()
        >>> for _ in range(3):
        ...     with torch.no_grad(), polycast.autocast("cpu", cache=cache):
        ...         y = model(torch.ones(1, 8))
        >>> cache.stats().misses, cache.stats().hits
        (2, 4)
    """

    def __init__(self, max_bytes: int | None = None, verify: bool = False) -> None:
        if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int)):
            raise TypeError(f"max_bytes must be an int or None, got {max_bytes!r}")
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, got {max_bytes}; None means no bound")
        if not isinstance(verify, bool):
            raise TypeError(f"verify must be a bool, got {verify!r}")
        self.max_bytes = max_bytes
        self.verify = verify
        self._stores: dict[str, CastStore] = {}

    def store(self, engine: str, make: Callable[[int | None, bool], _Store]) -> _Store:
        """Return the store that an engine keeps for this cache, made with `make` at its first use."""
        found = self._stores.get(engine)
        if found is None:
            found = self._stores.setdefault(engine, make(self.max_bytes, self.verify))
        return cast("_Store", found)

    def clear(self) -> None:
        """Drop every cast, and give the memory back."""
        for store in self._stores.values():
            store.clear()

    def stats(self) -> WeightCacheStats:
        """Return what the cache holds and has done so far."""
        totals = [sum(column) for column in zip(*(s.statistics() for s in self._stores.values()), strict=True)]
        return WeightCacheStats(*totals) if totals else WeightCacheStats(0, 0, 0, 0, 0)

    def __deepcopy__(self, memo: object) -> Self:
        """Return an empty cache with the same settings: the weights of a model that is copied are other weights."""
        return type(self)(self.max_bytes, self.verify)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a WeightCache cannot be copied or pickled: it holds casts of the weights of this process. Make a new one "
            "where you need it (copy.deepcopy does)."
        )


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


STALE = (
    "A weight was changed in a way that its version counter does not show (a write through .data), so the cast that "
    "the WeightCache kept is stale. Call clear() on the cache after such a write."
)


def is_weight(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a weight, whose casts are worth keeping.

    Weights are float32 leaves: those that require grad, and parameters that do not (frozen ones). Subclasses other than
    Parameter are cast anew each time, so that their own dispatch sees it; and so are the weights that FSDP gathers.
    """
    kind = type(tensor)
    return (
        tensor.dtype is torch.float32
        and (kind is torch.nn.Parameter or (kind is torch.Tensor and tensor.requires_grad))
        and tensor.is_leaf
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_inference()
        and not tensor._is_view()
        and not (_shares_its_storage(tensor) and storages_are_rewritten())
    )


def _shares_its_storage(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # the tensor, and the object that was just made


def storages_are_rewritten() -> bool:
    """Say whether something may write a weight through another tensor on its storage without counting a version.

    FSDP gathers weights so, into memory that it frees between uses, and it needs a process group.
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def caching_is_safe() -> bool:
    """Say whether a cast made now may serve later calls: not while something records, transforms or watches the ops."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )
