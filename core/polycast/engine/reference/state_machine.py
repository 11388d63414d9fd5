"""The state machine in Python: the one to read."""

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

from ...policy.cast_policy import CastPolicy
from ...torch_internals.dispatcher import excluded_keys
from ...torch_internals.private_names import current_graph_task_id, dispatch_mode_count, is_function_mode_enabled
from ..casts.cached_cast import with_history
from ..casts.cast_cache import CastCache
from ..casts.weights import Source, caching_is_safe, covers, weight_of
from ..override import Override
from ..recipes.prepacking import INTERCEPTED, NO_WEIGHT, NOT_CACHED
from ..state import Settings, clear_torchs_cache
from .frames import Frame, NoAutocast, ThreadRegions
from .store import PythonStore

CastWeight: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor | None]


class _Regions(threading.local):
    def __init__(self, threads: "set[weakref.ref[ThreadRegions]]") -> None:
        self.here = ThreadRegions()
        threads.add(weakref.ref(self.here, threads.discard))


class PythonStateMachine:
    """The state machine in Python."""

    def __init__(self) -> None:
        # Threads start and end at any time. Adding, removing and copying take one call each, which no thread and no
        # finalizer interrupts. Walking a WeakSet takes many, and a finalizer could find a lock held by its own thread.
        self._threads: set[weakref.ref[ThreadRegions]] = set()
        self._local = _Regions(self._threads)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget_other_threads)

    def _forget_other_threads(self) -> None:
        """Forget the threads that a fork did not copy, whose regions stay alive in the child."""
        mine = self._regions
        self._threads.intersection_update([thread for thread in self._threads.copy() if thread() is mine])

    @property
    def _regions(self) -> ThreadRegions:
        return self._local.here

    def enter(self, owner: object, settings: Settings) -> bool:
        """See :class:`StateMachine`, as for the other methods."""
        regions = self._regions
        device_type = settings.device_type
        while True:
            frames = regions.frames
            entered = (*frames, Frame(owner, settings, regions.innermost(device_type), regions.kernel))
            if regions.frames is frames:  # else the garbage collector has left a region meanwhile
                regions.frames = entered
                break
        torch.set_autocast_enabled(device_type, settings.enabled)
        torch.set_autocast_dtype(device_type, settings.dtype)
        if settings.cache_enabled is not None:
            torch.set_autocast_cache_enabled(settings.cache_enabled)
        torch.autocast_increment_nesting()
        return is_function_mode_enabled()

    def leave(self, owner: object) -> bool | None:
        """Remove a frame. Its state passes to the frame or kernels above it; if there are none, it is restored."""
        regions = self._regions
        while True:
            frames = regions.frames
            place = len(frames) - 1
            while place >= 0 and frames[place].owner is not owner:
                place -= 1
            if place < 0:
                return None
            frame, newer = frames[place], frames[place + 1 :]
            above = None
            for each in newer:
                if each.device_type == frame.device_type:
                    above = each
                    break
            others = frames[:place] + newer
            if regions.frames is frames:  # else the garbage collector has left a region meanwhile
                regions.frames = others
                break
        if newer:
            newer[0].cache_enabled_before = frame.cache_enabled_before
        else:
            torch.set_autocast_cache_enabled(frame.cache_enabled_before)
        regions.pass_on(frame, above)
        if torch.autocast_decrement_nesting() == 0:
            clear_torchs_cache()
        if not regions.frames:
            regions.store.clear()
        return is_function_mode_enabled()

    def last(self) -> tuple[object, Settings] | None:
        """Return owner and settings of the last region."""
        frames = self._regions.frames
        return (frames[-1].owner, frames[-1].settings) if frames else None

    def without_autocast(self, device_type: str, exclusion: AbstractContextManager[Any]) -> NoAutocast:
        """Return a context manager in which a kernel of a device runs; see :class:`NoAutocast`."""
        return NoAutocast(self._regions, device_type, exclusion)

    def runs_kernel(self, device_type: str) -> bool:
        """Return whether a kernel of a device runs on this thread."""
        kernel = self._regions.kernel
        while kernel is not None and kernel.device_type != device_type:
            kernel = kernel.outer
        return kernel is not None

    def open_regions(self, device_type: str) -> int:
        """Return the number of regions for a device, over all threads."""
        return sum(len(regions.of(device_type)) for regions in self._living())

    def _living(self) -> list[ThreadRegions]:
        return [regions for thread in self._threads.copy() if (regions := thread()) is not None]

    def innermost(self, device_type: str) -> tuple[Override | None, CastCache | None]:
        """Return override and cache of the innermost region for a device."""
        frame = self._regions.innermost(device_type)
        return (None, None) if frame is None else (frame.override, frame.cache)

    def nesting(self, device_type: str) -> int:
        """Return the number of regions for a device."""
        return len(self._regions.of(device_type))

    def matches(self, device_type: str) -> bool:
        """Return whether MATCH casts now: in regions of polycast, not in torch's own.

        A backward pass and a traced graph count as the former: they may run the ops of a region of polycast in one of
        torch's.
        """
        here = self._regions.innermost(device_type)
        return here is not None or current_graph_task_id() >= 0 or dispatch_mode_count() > 0

    def dtype(self, device_type: str) -> torch.dtype:
        """Return the fast dtype of a device on this thread."""
        return torch.get_autocast_dtype(device_type)

    def excluded_keys(self) -> int:
        """Return the dispatch keys that this thread excludes."""
        return excluded_keys()

    def forget_actions(self) -> None:
        """Do nothing: this engine keeps no actions."""

    def set_recomputing(self, backward: int | None) -> None:
        """Do nothing: Python decides each call in this engine."""

    def clear_own_casts(self, all_threads: bool) -> None:
        """Drop the casts of this thread's regions, or of all threads'."""
        for regions in self._living() if all_threads else [self._regions]:
            regions.store.clear()

    def region_methods(self, *_: object) -> None:
        """Return None: regions use the methods in Python."""

    def policy(self, name: str, device_type: str, default: CastPolicy | None) -> CastPolicy | None:
        """Return the policy of an op in this thread's region."""
        override, _ = self.innermost(device_type)
        return default if override is None else override.policies.get(name, default)

    def prepacked(
        self, cache: CastCache, weight: torch.Tensor, prepack_id: int, prepack: Callable[[torch.Tensor], Any]
    ) -> tuple[torch.Tensor, ...] | str | None:
        """See :class:`StateMachine`."""
        if not caching_is_safe():
            return INTERCEPTED
        source_weight = weight_of(weight, for_prepacking=True)
        if source_weight is None:
            return NO_WEIGHT
        if not torch.is_autocast_cache_enabled():
            return NOT_CACHED
        source = Source(weight, source_weight, holders=1 if weight is source_weight else 2)
        return self.store(cache).prepacked(source, prepack_id, prepack)

    def store(self, cache: CastCache) -> PythonStore:
        """See :class:`StateMachine`."""
        return cache.store("reference", PythonStore)

    def has_recipe(self, name: str, device_type: str) -> bool:
        """Return whether the recipe of this thread's region computes an op."""
        override, _ = self.innermost(device_type)
        return override is not None and name in override.recipe_ops

    def weight_caster(self, device_type: str) -> CastWeight | None:
        """Return what casts a weight or a view in this thread's region, and keeps the cast; None where it is in none.

        It is given the weight that the tensor is or is a view of. The history of a view is that of one use, as torch's
        is: to share one would add up the gradients of several uses in the fast dtype.

        Where dispatch modes see the casts, only those are kept that torch keeps, and only in the region: the modes may
        write weights unseen.
        """
        frame = self._regions.innermost(device_type)
        if frame is None:
            return None
        cache = frame.cache
        own = self._regions.store
        only_as_torch = not caching_is_safe()
        store = own if cache is None or only_as_torch else self.store(cache)

        def cast(tensor: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
            if only_as_torch and not (tensor is weight and weight.requires_grad):
                return None
            link = tensor.requires_grad and torch.is_grad_enabled()
            if tensor is weight:
                if link:
                    return own.cast_with_history(weight, dtype, store)
                return store.cast(Source(weight, weight), dtype)
            if covers(tensor, weight):
                of_weight = store.cast(Source(weight, weight, holders=2), dtype)
                with torch.no_grad():
                    cached = of_weight.as_strided(tensor.shape, tensor.stride())
            elif store is own:  # a region's casts are those that torch would keep
                return None
            else:
                cached = store.cast(Source(tensor, weight, holders=2), dtype)
            return with_history(tensor, cached) if link else cached

        return cast
