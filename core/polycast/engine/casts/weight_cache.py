"""The casts of weights that are kept, so that a weight that is used again is not cast again.

torch's own cache is one for the process, keyed by the tensor alone. A store here belongs to one thread, or to a user
who shares it (WeightCache). An entry holds while the weight is alive and is what it was: the same version, the same
memory. Casts to several dtypes live side by side, and a cast that was made without history serves grad mode too, on the
same memory with history.

The stores themselves are the engines': reference/store.py is the one to read, native/store.h the other.
"""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeVar, cast

from typing_extensions import Self


@dataclass(frozen=True)
class WeightCacheStats:
    """What a WeightCache holds and has done.

    Attributes:
        entries: casts that are kept.
        bytes: their memory.
        hits: how often something kept served: a cast, or what a recipe has packed a weight into.
        misses: how often it was made.
        evictions: how many were dropped to keep within max_bytes.
        packings: what recipes have packed weights into, and is kept.
        packed_bytes: its memory.
    """

    entries: int
    bytes: int
    hits: int
    misses: int
    evictions: int
    packings: int = 0
    packed_bytes: int = 0


class CastStore(Protocol):
    """A store of casts, of either engine."""

    def clear(self) -> None:
        """Drop every cast."""

    def statistics(self) -> tuple[int, ...]:
        """Return what WeightCacheStats has, in its order."""


_Store = TypeVar("_Store", bound=CastStore)
caches_alive: "weakref.WeakValueDictionary[int, WeightCache]" = weakref.WeakValueDictionary()
"""The caches that there are, by identity: as long as there is one, writes of weights are watched."""
_identities = itertools.count(1)


def cache_by_identity(identity: int) -> "WeightCache | None":
    """Return the cache that compiled code names, if it is alive."""
    return caches_alive.get(identity)


class WeightCache:
    """Casts of weights that outlive regions: inference with float32 weights at the speed of a bfloat16 model.

    Give one to any regions, on any threads. It keeps a cast until the weight changes or dies, :meth:`clear` is called,
    or the cache itself dies. Casts made under ``torch.no_grad`` and ``torch.inference_mode`` serve grad mode too.

    In-place updates (an optimizer's step, also of a fused one; ``load_state_dict``; a collective), a new
    ``weight.data = ...`` and writes through ``.data`` (``weight.data.add_(1)``) are seen. No cast is kept while
    something else holds the weight's memory and may write it unseen, such as ``alias = weight.data``. What C++ writes
    at a raw pointer is not seen: call :meth:`clear` after it.

    Args:
        max_bytes: the memory that casts, and what recipes pack weights into, may take. A new one takes the place of
            the least recently used one, if that was not used while the new one was wanted as often; of packed
            weights, 16 times. None: no bound.
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
        self.identity = next(_identities)
        self.number = str(self.identity)
        caches_alive[self.identity] = self

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
