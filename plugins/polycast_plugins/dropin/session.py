"""Add what ``polycast run`` is given to the regions of a program, in each process, and summarize them at the end."""

import atexit
import functools
import itertools
import multiprocessing.spawn
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from polycast import Policy, WeightCache, autocast, autocast_nesting
from polycast.plugin import Feature, Patch, choose_engine, dtype_name, events, find_slow_dtype, get_backend

from .patch import patch_torch
from .shim import PatchedRegion

if TYPE_CHECKING:
    from .observing import ObservedOutput
    from .recipe_summary import RecipeSummary


@dataclass(frozen=True)
class Options:
    """The options of ``polycast run``.

    Attributes:
        weight_cache: keep the casts of weights between regions that are entered under ``no_grad``.
        wrap: device type and dtype of the region around each outermost call of a module; None for no such region.
        policy: the policy of the outermost regions.
        observed: what is written of each process; None: it is not observed.
        recipe: the recipe of the outermost regions, as text.
    """

    weight_cache: bool = False
    wrap: tuple[str, torch.dtype | None] | None = None
    policy: Policy | None = None
    observed: "ObservedOutput | None" = None
    recipe: str | None = None


class RunOverrides:
    """Adds policy, recipe and cache to the regions of a program, and counts the regions.

    `summary` stops counting when a region is entered after its time.
    """

    def __init__(self, options: Options, summary: "RecipeSummary | None" = None) -> None:
        self.policy, self.recipe = options.policy, options.recipe
        self.cache = WeightCache() if options.weight_cache else None
        self.summary = summary
        self._regions: dict[tuple[str, torch.dtype | None], Iterator[int]] = {}
        self._with_grad = itertools.count()

    def apply(self, region: PatchedRegion) -> autocast:
        """Count a region that is about to be entered, and return the one to enter."""
        given = region._settings
        key = given.device_type, given.dtype if given.enabled else None
        next(self._regions.setdefault(key, itertools.count()))  # threads and forks need no lock for this
        if self.cache is None and self.policy is None and self.recipe is None:
            return region
        if self.summary is not None:
            self.summary.end_if_late()
        is_outermost = not autocast_nesting(given.device_type)
        caches = self.cache is not None and not torch.is_grad_enabled()
        if not caches and given.enabled:
            next(self._with_grad)
        return autocast(
            given.device_type,
            given.dtype,
            given.enabled,
            True if caches else given.cache_enabled,
            cache=self.cache if caches else None,
            policy=self.policy if is_outermost else None,
            recipe=self.recipe if is_outermost else None,
        )

    @property
    def dtypes(self) -> list[tuple[str, torch.dtype]]:
        """The device and fast dtype of each enabled region."""
        return [(device, dtype) for device, dtype in self._regions if dtype is not None]

    def cache_summary(self, cache: WeightCache) -> str:
        """Return what the cache did and, without hits, all reasons. Call it once: it advances a counter."""
        if not choose_engine().caches:
            return "weight cache: none on this engine"
        stats, with_grad = cache.stats(), next(self._with_grad)
        reasons = []
        if with_grad:
            regions = f"{with_grad} region{'s' * (with_grad > 1)}"
            reasons.append(f"{regions} entered with grad on; it is for those under torch.no_grad()")
        if stats.misses:
            reasons.append("each weight was cast once")
        reason = "" if stats.hits else f" ({'; '.join(reasons) or 'no region cast a weight'})"
        return f"weight cache: {stats.hits} hits{reason}, {stats.misses} misses, {stats.bytes / 2**20:.1f} MiB"

    def counts(self) -> dict[str, int]:
        """Return how many regions were entered, by device and dtype; call it once, as reading a counter advances it."""
        return {
            f"{device} {dtype_name(dtype) if dtype else 'disabled'}": next(counter)
            for (device, dtype), counter in sorted(self._regions.items(), key=str)
        }


_slow: dict[tuple[str, torch.dtype], None] = {}
"""The devices and slow dtypes of polycast's own regions in the program."""


def _note_slow_dtype(device_type: str, dtype: torch.dtype) -> None:
    _slow[device_type, dtype] = None


def start(options: Options, *, is_first: bool = True, summarizes: bool = False) -> None:
    """Patch torch in this process until it ends, and in those that multiprocessing spawns from it.

    Args:
        options: the options.
        is_first: whether this is the process that the user started.
        summarizes: write the summary when this process ends, after all that the program writes.
    """
    events.slow_dtype.add(_note_slow_dtype)
    summary = None
    if summarizes and options.recipe is not None:
        from .recipe_summary import RecipeSummary  # few programs need it, and its import is slow

        summary = RecipeSummary(options.recipe)
    overrides = RunOverrides(options, summary)
    PatchedRegion.replace = overrides.apply
    patch_torch().start()
    if options.wrap is not None:
        _wrap_modules(*options.wrap)
    _start_in_spawned_processes(options)
    if summarizes:
        _summarize_at_exit(overrides)
    if options.observed is not None:
        from .observing import ObservedProcess  # likewise

        ObservedProcess(options.observed, is_first=is_first).start()


def _wrap_modules(device_type: str, dtype: torch.dtype | None) -> None:
    """Run the outermost calls of modules in a region (``--wrap``), unless they are in one for the device."""
    call = torch.nn.Module.__call__
    inside = threading.local()

    @functools.wraps(call)
    def wrapped(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "one", False) or autocast_nesting(device_type):
            return call(module, *args, **kwargs)
        inside.one = True
        try:
            with PatchedRegion(device_type, dtype):
                return call(module, *args, **kwargs)
        finally:
            inside.one = False

    def replace(patch: Patch) -> None:
        patch.replace(torch.nn.Module, "__call__", wrapped)

    change = "torch.nn", ("torch.nn.Module.__call__",), replace
    Feature("polycast run --wrap", "", (change,), outlives_uninstall=True).make()


def _summarize_at_exit(overrides: RunOverrides) -> None:
    process = os.getpid()

    def summarize() -> None:
        if os.getpid() == process and sys.stderr is not None:  # a fork may end in the usual way too
            print(_summary(overrides), file=sys.stderr, flush=True)

    atexit.register(summarize)


def _summary(overrides: RunOverrides) -> str:
    counts = overrides.counts()
    if not counts:
        return "polycast: no region was entered: the program did not use torch.autocast (see polycast run --wrap)"
    total, recipe = sum(counts.values()), overrides.summary
    each = ", ".join(f"{name} {count}" for name, count in counts.items())
    parts = [f"polycast: {choose_engine().name} engine", f"{total} region{'s' * (total > 1)} ({each})"]
    if overrides.cache is not None:
        parts.append(overrides.cache_summary(overrides.cache))
    if recipe is not None:
        parts.append(recipe.text())
    slow = () if recipe is not None and recipe.is_complete() else _slow_dtypes(overrides)
    return "\n  ".join([", ".join(parts), *slow])


def _slow_dtypes(overrides: RunOverrides) -> Iterator[str]:
    """Yield a line for each device and dtype of the program's regions that is slow there."""
    for device_type, dtype in dict.fromkeys([*_slow, *overrides.dtypes]):
        slow = find_slow_dtype(get_backend(device_type), dtype)
        if slow is not None:
            faster = slow.faster_recipes().items()
            ways = [f"--recipe {kind}{note}" for kind, note in faster if kind != overrides.recipe]
            yield f"{slow}{'. Faster: ' * bool(ways)}{', '.join(ways)}"


class _StartWhenUnpickled:
    """Starts polycast where it is unpickled: in a process that multiprocessing spawns, before its main module runs."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Options]]:
        return functools.partial(start, is_first=False), (self._options,)


def _start_in_spawned_processes(options: Options) -> None:
    # A spawned process and the fork server unpickle what this function returns. A fork has everything already.
    prepare: Callable[[str], dict[str, Any]] = multiprocessing.spawn.get_preparation_data

    @functools.wraps(prepare)
    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**prepare(name), "polycast": _StartWhenUnpickled(options)}

    setattr(multiprocessing.spawn, "get_preparation_data", get_preparation_data)
