"""`WeightCache`: casts of weights that outlive regions.

torch's own cache is one for the process, keyed by the tensor alone. A store here belongs to one thread, or to a user
(`WeightCache`). An entry is valid while its weight is alive, at the same version and in the same memory. Casts to
several dtypes live side by side. A cast without autograd history serves grad mode too: the same memory is given one.

Each engine has stores of its own: reference/store.py, to be read first, and native/user_store.h.
"""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeVar, cast

from typing_extensions import Self


@dataclass(frozen=True)
class WeightCacheStats:
    """The contents of a WeightCache, and counts of its use.

    Attributes:
        entries: the number of casts.
        bytes: the memory of the casts.
        hits: lookups that found a cast or a prepacked weight.
        misses: casts and prepacked weights that were made.
        evictions: entries that were dropped for max_bytes.
        packings: the number of prepacked weights, which recipes use.
        packed_bytes: the memory of the prepacked weights.
    """

    entries: int
    bytes: int
    hits: int
    misses: int
    evictions: int
    packings: int = 0
    packed_bytes: int = 0


class CastStore(Protocol):
    """A store of either engine."""

    def clear(self) -> None:
        """Drop all entries."""

    def statistics(self) -> tuple[int, ...]:
        """Return the fields of WeightCacheStats."""


_Store = TypeVar("_Store", bound=CastStore)
caches_alive: "weakref.WeakValueDictionary[int, WeightCache]" = weakref.WeakValueDictionary()
"""The caches that are alive, by identity. While there is one, writes of weights are watched."""
_identities = itertools.count(1)


def cache_by_identity(identity: int) -> "WeightCache | None":
    """Return the cache that compiled code refers to, if it is alive."""
    return caches_alive.get(identity)


class WeightCache:
    """Casts of weights that outlive regions: inference with float32 weights at the speed of a bfloat16 model.

    Pass one to any regions, on any threads. It caches a cast until the weight changes or is freed, or until the cache
    is cleared or freed. Casts made under ``torch.no_grad`` and ``torch.inference_mode`` serve grad mode too.

    In-place updates (an optimizer's step, also of a fused one; ``load_state_dict``; a collective), a new
    ``weight.data = ...`` and writes through ``.data`` (``weight.data.add_(1)``) are seen. No cast is cached while
    something else holds the weight's memory and may write it unseen, such as ``alias = weight.data``. Writes of C++ at
    a raw pointer are not seen: call :meth:`clear` after them.

    Args:
        max_bytes: the memory limit for casts and prepacked weights. A new entry evicts the least recently used one,
            if that was not used while the new one was needed as often (16 times for prepacked weights). None: no limit.
        verify: compare the cast with the weight at every hit, to find writes that were not seen. Slow.

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
        self.identity = next(_identities)
        self.number = str(self.identity)
        caches_alive[self.identity] = self

    def store(self, engine: str, make: Callable[[int | None, bool], _Store]) -> _Store:
        """Return the store of an engine, made with `make` at its first use."""
        found = self._stores.get(engine)
        if found is None:
            found = self._stores.setdefault(engine, make(self.max_bytes, self.verify))
        return cast("_Store", found)

    def clear(self) -> None:
        """Drop all entries."""
        for store in self._stores.values():
            store.clear()

    def stats(self) -> WeightCacheStats:
        """Return the contents of the cache, and counts of its use."""
        totals = [sum(column) for column in zip(*(s.statistics() for s in self._stores.values()), strict=True)]
        return WeightCacheStats(*totals) if totals else WeightCacheStats(0, 0, 0, 0, 0)

    def __repr__(self) -> str:
        stats = self.stats()
        entries = stats.entries + stats.packings
        size = (stats.bytes + stats.packed_bytes) / 2**20
        return f"<WeightCache: entries {entries}, MiB {size:.1f}, hits {stats.hits}, misses {stats.misses}>"

    def __deepcopy__(self, memo: object) -> Self:
        """Return an empty cache with the same settings: the weights of a copied model are other weights."""
        return type(self)(self.max_bytes, self.verify)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a WeightCache cannot be copied or pickled: it holds casts of the weights of this process. Make a new one "
            "where you need it (copy.deepcopy does)."
        )
