"""The settings that a process of ``polycast run`` starts with, and its summary."""

import atexit
import functools
import multiprocessing.spawn
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from polycast import Policy, WeightCache
from polycast.plugin import choose_engine, events, find_slow_dtype, get_backend

from .overrides import RunOverrides
from .patch import WRAP, patch_torch
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


_slow: dict[tuple[str, torch.dtype], None] = {}
"""The devices and slow dtypes of polycast's own regions in the program."""


def _note_slow_dtype(device_type: str, dtype: torch.dtype) -> None:
    _slow[device_type, dtype] = None


def start(options: Options, *, is_first: bool = True, summarizes: bool = False) -> None:
    """Patch torch in this process until it ends, and in those that multiprocessing spawns from it.

    Args:
        options: what the regions get, and what is written.
        is_first: whether this is the process that the user started.
        summarizes: write the summary when this process ends, after all that the program writes.
    """
    events.slow_dtype.add(_note_slow_dtype)
    cache = WeightCache() if options.weight_cache else None
    recipe = None
    if summarizes and options.recipe is not None:
        from .recipe_summary import RecipeSummary  # few programs need it, and its import is slow

        recipe = RecipeSummary(options.recipe)
    overrides = PatchedRegion.overrides = RunOverrides(options.policy, options.recipe, cache, options.wrap, recipe)
    patch_torch().start()
    if options.wrap is not None:
        WRAP.make()
    _start_in_spawned_processes(options)
    if summarizes:
        _summarize_at_exit(overrides, recipe)
    if options.observed is not None:
        from .observing import ObservedProcess  # likewise

        ObservedProcess(options.observed, is_first=is_first).start()


def _summarize_at_exit(overrides: RunOverrides, recipe: "RecipeSummary | None") -> None:
    process = os.getpid()

    def summarize() -> None:
        if os.getpid() == process and sys.stderr is not None:  # a fork may end in the usual way too
            print(_summary(overrides, recipe), file=sys.stderr, flush=True)

    atexit.register(summarize)


def _summary(overrides: RunOverrides, recipe: "RecipeSummary | None") -> str:
    counts = overrides.counts()
    if not counts:
        return "polycast: no region was entered: the program did not use torch.autocast (see polycast run --wrap)"
    total = sum(counts.values())
    each = ", ".join(f"{name} {count}" for name, count in counts.items())
    parts = [f"polycast: {choose_engine().name} engine", f"{total} region{'s' * (total > 1)} ({each})"]
    if overrides.cache is not None:
        parts.append(overrides.cache_summary())
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
        return _start_in_spawned, (self._options,)


def _start_in_spawned(options: Options) -> None:
    start(options, is_first=False)


def _start_in_spawned_processes(options: Options) -> None:
    # A spawned process and the fork server unpickle what this function returns. A fork has everything already.
    prepare: Callable[[str], dict[str, Any]] = multiprocessing.spawn.get_preparation_data

    @functools.wraps(prepare)
    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**prepare(name), "polycast": _StartWhenUnpickled(options)}

    setattr(multiprocessing.spawn, "get_preparation_data", get_preparation_data)
