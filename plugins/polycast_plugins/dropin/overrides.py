"""The settings that ``polycast run`` adds to the regions of a program."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from polycast import Policy, WeightCache, autocast, autocast_nesting
from polycast.plugin import dtype_name

if TYPE_CHECKING:
    from .recipe_summary import RecipeSummary


class RunOverrides:
    """Add policy, recipe and cache to the regions of a program, and count the regions.

    Args:
        policy: a policy for each outermost region.
        recipe: a recipe for each outermost region.
        cache: a cache for each region that is entered under ``no_grad``, also with ``cache_enabled=False``.
        wrap: device type and dtype of a region around each outermost call of a module.
        summary: stops counting when a region is entered after its time.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        recipe: str | None = None,
        cache: WeightCache | None = None,
        wrap: tuple[str, torch.dtype | None] | None = None,
        summary: "RecipeSummary | None" = None,
    ) -> None:
        self.cache = cache
        self.wrap = wrap
        self._summary = summary
        self._policy = policy
        self.recipe = recipe
        self._regions: dict[tuple[str, torch.dtype | None], Iterator[int]] = {}
        self._with_grad = itertools.count()

    def apply(
        self, region: autocast, device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool | None
    ) -> autocast:
        """Count a region that is about to be entered, with these settings, and return the one to enter."""
        key = device_type, dtype if enabled else None
        next(self._regions.setdefault(key, itertools.count()))  # threads and forks need no lock for this
        if self.cache is None and self._policy is None and self.recipe is None:
            return region
        if self._summary is not None:
            self._summary.end_if_late()
        is_outermost = not autocast_nesting(device_type)
        caches = self.cache is not None and not torch.is_grad_enabled()
        if not caches and enabled:
            next(self._with_grad)
        return autocast(
            device_type,
            dtype,
            enabled,
            True if caches else cache_enabled,
            cache=self.cache if caches else None,
            policy=self._policy if is_outermost else None,
            recipe=self.recipe if is_outermost else None,
        )

    @property
    def dtypes(self) -> list[tuple[str, torch.dtype]]:
        """The device and fast dtype of each enabled region."""
        return [(device, dtype) for device, dtype in self._regions if dtype is not None]

    def cache_summary(self) -> str:
        """Return what the cache did and, without hits, all reasons. Call it once: it advances a counter."""
        assert self.cache is not None
        stats, with_grad = self.cache.stats(), next(self._with_grad)
        s = "s" * (with_grad > 1)
        reasons = [f"{with_grad} region{s} entered with grad on; it is for those under torch.no_grad()"] * bool(
            with_grad
        )
        reasons += ["each weight was cast once"] * bool(stats.misses)
        reason = "" if stats.hits else f" ({'; '.join(reasons) or 'no region cast a weight'})"
        return f"weight cache: {stats.hits} hits{reason}, {stats.misses} misses, {stats.bytes / 2**20:.1f} MiB"

    def counts(self) -> dict[str, int]:
        """Return how many regions were entered, by device and dtype; call it once, as reading a counter advances it."""
        return {
            f"{device} {dtype_name(dtype) if dtype else 'disabled'}": next(counter)
            for (device, dtype), counter in sorted(self._regions.items(), key=str)
        }
