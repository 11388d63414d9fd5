"""What is in force while ``polycast run`` runs a program: torch patched, and what the options ask for."""

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

from ..engine import state
from ..engine.casts.weight_cache import WeightCache
from ..engine.choice import choose
from ..engine.low_bit.listeners import listeners as low_bit_listeners
from ..engine.state import Settings
from ..plugins.registry import registry
from ..policy.dtypes import dtype_name
from ..policy.value import Policy
from ..region.policies import override_of, with_recipe
from ..region.recipes import usable_recipe
from . import stand_in
from .patch import patch_torch

if TYPE_CHECKING:
    from .observing import Wanted
    from .recipe_share import RecipeShare


@dataclass(frozen=True)
class Options:
    """What a session is made of.

    Attributes:
        weight_cache: keep the casts of weights between regions that are entered under no_grad.
        wrap: device type and dtype of the region that the outermost call of a module runs in; None for no such region.
        policy: what the outermost regions lay over the tables of the backends.
        recipe: the recipe of the outermost regions, as text.
        observed: what is to be written of what runs; None: nothing, and it is not observed.
    """

    weight_cache: bool = False
    wrap: tuple[str, torch.dtype | None] | None = None
    policy: Policy | None = None
    observed: "Wanted | None" = None
    recipe: str | None = None


class Session:
    """A session, in force from :meth:`start` until the process ends: threads may outlive the program's last line."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._regions: dict[tuple[str, torch.dtype | None], Iterator[int]] = {}
        self._cache = WeightCache() if options.weight_cache else None
        self._low_bit: dict[tuple[str, str | None], Iterator[int]] = {}
        self._reports = False
        self._share: RecipeShare | None = None

    def start(self, *, is_first: bool = True) -> None:
        """Put it in force; in the processes that are spawned too, of which none `is_first`."""
        if self._reports and self._options.recipe is not None:
            self._share = _started_share()
        patch_torch().start()
        stand_in.on_entry = self._on_entry()
        if self._options.recipe is not None:
            low_bit_listeners.add(self._note_low_bit)
        if self._options.wrap is not None:
            _wrap_modules(*self._options.wrap)
        _extend_to_spawned(self._options)
        if self._options.observed is not None:
            from .observing import ObservedProcess  # which few programs need, and takes a while to import

            self._observed = ObservedProcess(self._options.observed, is_first=is_first)
            self._observed.start()

    def report_at_exit(self) -> None:
        """Write the summary when this process ends, after all that the program does."""
        self._reports = True
        process = os.getpid()

        def report() -> None:
            if os.getpid() == process and sys.stderr is not None:  # a fork may end in the usual way too
                print(self.summary(), file=sys.stderr, flush=True)

        atexit.register(report)

    def _on_entry(self) -> Callable[[Settings], Settings]:
        cache, policy, recipe, share = self._cache, self._options.policy, self._options.recipe, self._share
        regions = self._regions

        @functools.lru_cache  # a program has few, and enters them often
        def given(settings: Settings, is_outermost: bool, keeps: bool) -> Settings:
            override = override_of(policy, settings.device_type) if is_outermost and policy is not None else None
            if is_outermost and recipe is not None:
                usable = usable_recipe(recipe, registry.find(settings.device_type), settings.enabled)
                override = with_recipe(override, usable)
            return settings._replace(cache=cache if keeps else None, override=override)

        def on_entry(settings: Settings) -> Settings:
            key = settings.device_type, settings.dtype if settings.enabled else None
            next(regions.setdefault(key, itertools.count()))  # threads and forks need no lock for this
            if cache is None and policy is None and recipe is None:
                return settings
            if share is not None:
                share.note_region()
            keeps = cache is not None and settings.cache_enabled is not False and not torch.is_grad_enabled()
            is_outermost = state.machine.innermost(settings.device_type) is None
            return given(settings, is_outermost, keeps)

        return on_entry

    def summary(self) -> str:
        """Return the line that says what ran; asked for once, because the counters count the question."""
        counts = {key: next(counter) for key, counter in sorted(self._regions.items(), key=str)}
        if not counts:
            return "polycast: no region was entered: the program did not use torch.autocast (see polycast run --wrap)"
        each = [
            f"{device} {dtype_name(dtype) if dtype else 'disabled'} {count}"
            for (device, dtype), count in counts.items()
        ]
        total = sum(counts.values())
        said = f"polycast: {choose().name} engine, {total} region{'s' * (total > 1)} ({', '.join(each)})"
        if self._cache is not None:
            stats = self._cache.stats()
            said += f", weight cache: {stats.hits} hits, {stats.misses} misses, {stats.bytes / 2**20:.1f} MiB"
        return said + self._low_bit_summary()

    def _note_low_bit(self, device_type: str, recipe: str, op: str, reason: str | None) -> None:
        next(self._low_bit.setdefault((op.removeprefix("aten::"), reason), itertools.count()))

    def _low_bit_summary(self) -> str:
        if self._options.recipe is None:
            return ""
        counts = {key: next(counter) for key, counter in self._low_bit.items()}
        ran = sum(count for (_, reason), count in counts.items() if reason is None)
        declined = {
            key: count for key, count in sorted(counts.items(), key=lambda item: -item[1]) if key[1] is not None
        }
        return f", {self._options.recipe}: {ran} op{'s' * (ran != 1)}" + "".join(
            f"\n  {line}"
            for line in (
                *(f"{count} {op} in the fast dtype: {reason}" for (op, reason), count in declined.items()),
                *(() if self._share is None else self._share.lines()),
            )
        )


def _started_share() -> "RecipeShare | None":
    from .recipe_share import RecipeShare  # which few programs need, and takes a while to import

    share = RecipeShare()
    try:
        share.start()
    except RuntimeError:  # the observer cannot be built: the summary does without
        return None
    return share


def _wrap_modules(device_type: str, dtype: torch.dtype | None) -> None:
    """Have the outermost call of a module, on each thread, run in a region, unless it is in one for the device."""
    call = torch.nn.Module.__call__
    inside = threading.local()

    @functools.wraps(call)
    def wrapped(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "one", False) or state.machine.nesting(device_type):
            return call(module, *args, **kwargs)
        inside.one = True
        try:
            with stand_in.StandIn(device_type, dtype):
                return call(module, *args, **kwargs)
        finally:
            inside.one = False

    setattr(torch.nn.Module, "__call__", wrapped)


class _InSpawned:
    """Starts a session where it is unpickled: in a process that multiprocessing spawns, before its main module runs."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __reduce__(self) -> tuple[Callable[[Options], None], tuple[Options]]:
        return _start_in_spawned, (self._options,)


def _start_in_spawned(options: Options) -> None:
    Session(options).start(is_first=False)


def _extend_to_spawned(options: Options) -> None:
    # Fork needs nothing. Spawned processes and the fork server's read what this function returns, and take from it what
    # they know.
    prepare: Callable[[str], dict[str, Any]] = multiprocessing.spawn.get_preparation_data

    @functools.wraps(prepare)
    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**prepare(name), "polycast": _InSpawned(options)}

    setattr(multiprocessing.spawn, "get_preparation_data", get_preparation_data)
