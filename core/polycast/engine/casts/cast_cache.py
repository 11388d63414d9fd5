"""`CastCache`: casts of weights that outlive regions.

torch's own cache is one for the process, keyed by the tensor alone. A store here belongs to one thread, or to a cache.
An entry is valid while its weight is alive, at the same version and in the same memory. Casts to several dtypes live
side by side. A cast without autograd history serves grad mode too: the same memory is given one.

The stores are the native engine's, native/user_store.h. On the reference engine a cache stays empty. Users have the
subclass `WeightCache`, in weight_cache.py.
"""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from typing_extensions import Self

EntryKind: TypeAlias = torch.dtype | int
"""The kind of an entry: the dtype of a cast, or the id of a prepacked weight (`Plan.new_id`, recipes/plan.py)."""


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


class StoredEntry(NamedTuple):
    """An item of :meth:`CastCache.entries`; without tensors, a weight that cannot be prepacked."""

    weight: torch.Tensor
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None
    kind: EntryKind
    tensors: tuple[torch.Tensor, ...]


caches_alive: "weakref.WeakValueDictionary[int, CastCache]" = weakref.WeakValueDictionary()
"""The caches that are alive, by the identity by which compiled code refers to them. While there is one, writes of
weights are watched."""
_identities = itertools.count(1)


class CastCache:
    """A cache of casts and prepacked weights; see `WeightCache`."""

    _store: Any = None
    """A UserStore of native/user_store.h, once there are entries."""

    def __init__(self, max_bytes: int | None = None, verify: bool = False) -> None:
        if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int)):
            raise TypeError(f"max_bytes must be an int or None, got {max_bytes!r}")
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, got {max_bytes}; None means no bound")
        if not isinstance(verify, bool):
            raise TypeError(f"verify must be a bool, got {verify!r}")
        self.max_bytes = max_bytes
        self.verify = verify
        self.identity = next(_identities)
        self.number = str(self.identity)
        caches_alive[self.identity] = self

    def store(self, make: Callable[[int | None, bool], Any]) -> Any:
        """Return the store, made with `make` at its first use."""
        if self._store is None:  # two threads get the same
            vars(self).setdefault("_store", make(self.max_bytes, self.verify))
        return self._store

    def entries(self) -> list[StoredEntry]:
        """Return what the cache has. :meth:`WeightCache.adopt` takes it, in this process.

        Returns:
            A list. Each item has the `weight`, the sizes, strides and offset of the `view` of it that was cast or
            prepacked, or None, the `kind`, which is a dtype for a cast, and the `tensors`.
        """
        return [] if self._store is None else [StoredEntry(*entry) for entry in self._store.entries()]

    def clear(self) -> None:
        """Drop all entries."""
        if self._store is not None:
            self._store.clear()

    def stats(self) -> WeightCacheStats:
        """Return the contents of the cache, and counts of its use."""
        return WeightCacheStats(0, 0, 0, 0, 0) if self._store is None else WeightCacheStats(*self._store.statistics())

    def _repr_html_(self) -> str:
        from ...policy.result import html_table  # few regions need it

        return html_table(("WeightCache", ""), vars(self.stats()).items())

    def __deepcopy__(self, memo: object) -> Self:
        """Return an empty cache with the same settings: the weights of a copied model are other weights."""
        return type(self)(self.max_bytes, self.verify)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a WeightCache cannot be copied or pickled: it holds casts of the weights of this process. Make a new one "
            "where you need it (copy.deepcopy does)."
        )


class _ProcessCache:
    """The cache of prepacked weights for regions without a :class:`WeightCache`.

    Attributes:
        existing: the cache; None before its first use, and after kernels were uninstalled.
    """

    existing: CastCache | None = None

    @property
    def cache(self) -> CastCache:
        """The cache, which is made at its first use."""
        found = self.existing
        if found is None:
            found = self.existing = CastCache()
        return found


process_cache = _ProcessCache()
