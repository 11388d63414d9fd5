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
from ...torch_internals.private_names import is_function_mode_enabled
from ..casts.cached_cast import with_history
from ..casts.cast_cache import CastCache
from ..casts.not_prepacked import INTERCEPTED, NO_WEIGHT, NOT_CACHED
from ..casts.weights import Source, caching_is_safe, covers, weight_of
from ..override import Override
from ..state import Settings
from .store import PythonStore

_CastWeight: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor | None]


class Frame:
    """An open region of a thread: its owner, the state before it, and its neighbours.

    `older` and `newer` are its neighbours among the thread's regions, `below` and `above` among those for the device;
    `earlier` is the owner's previous open region, and `kernel` the innermost kernel of the device at entry.
    """

    def __init__(self, owner: object, settings: Settings, below: "Frame | None", kernel: "NoAutocast | None") -> None:
        self.owner = owner
        self.settings = settings
        self.device_type = settings.device_type
        self.enabled_before = torch.is_autocast_enabled(settings.device_type)
        self.dtype_before = torch.get_autocast_dtype(settings.device_type)
        self.cache_enabled_before = torch.is_autocast_cache_enabled()
        self.override = settings.override
        self.cache = settings.cache
        self.older: Frame | None = None
        self.newer: Frame | None = None
        self.earlier: Frame | None = None
        self.below = below
        self.above: Frame | None = None
        self.kernel = kernel
        if below is not None and not settings.absolute:
            self.override = below.override if self.override is None else self.override.over(below.override)
            self.cache = below.cache if self.cache is None else self.cache


class _ThreadRegions:
    """The regions of one thread.

    Any call may raise, even of a builtin: RecursionError, or what a signal handler raises. So all calls come before
    the first change, and :meth:`push` makes the calls that :meth:`remove` does: a region that could be entered can be
    left.
    """

    def __init__(self) -> None:
        self.newest: Frame | None = None
        self.innermost: dict[str, Frame] = {}
        self.depth: dict[str, int] = {}
        self.kernel: dict[str, NoAutocast | None] = {}
        self.store = PythonStore(of_region=True)
        self._by_owner: dict[int, Frame] = {}

    def push(self, frame: Frame) -> None:
        """Push a frame."""
        key = id(frame.owner)
        frame.earlier = self._by_owner.get(key)
        depth = self.depth.get(frame.device_type, 0)

        frame.older, self.newest = self.newest, frame
        if frame.older is not None:
            frame.older.newer = frame
        if frame.below is not None:
            frame.below.above = frame
        self.innermost[frame.device_type] = frame
        self.depth[frame.device_type] = depth + 1
        self._by_owner[key] = frame

    def remove(self, owner: object) -> Frame | None:
        """Remove the innermost frame of an owner, and return it; None if there is none."""
        key = id(owner)
        frame = self._by_owner.get(key)
        if frame is None:
            return None

        if frame.earlier is not None:
            self._by_owner[key] = frame.earlier
        else:
            del self._by_owner[key]
        if frame.older is not None:
            frame.older.newer = frame.newer
        if frame.newer is not None:
            frame.newer.older = frame.older
        else:
            self.newest = frame.older
        if frame.below is not None:
            frame.below.above = frame.above
        if frame.above is not None:
            frame.above.below = frame.below
        elif frame.below is not None:
            self.innermost[frame.device_type] = frame.below
        else:
            del self.innermost[frame.device_type]
        self.depth[frame.device_type] -= 1
        return frame

    def kernel_above(self, frame: Frame) -> "NoAutocast | None":
        """Return the kernel directly above a frame; None if there is none, or another frame is."""
        kernel = self.kernel.get(frame.device_type)
        if kernel is frame.kernel or (frame.above is not None and frame.above.kernel is frame.kernel):
            return None
        while kernel is not None and kernel.outer is not frame.kernel:
            kernel = kernel.outer
        return kernel


class NoAutocast:
    """Keeps autocast off for a device while a kernel runs, and restores it afterwards.

    A kernel may run Python: a backend's, a dispatch mode's or that of the garbage collector, which may leave regions
    around the kernel or leave one open. So like a frame, it holds the state to restore, and passes it to a frame above.

    Args:
        regions: those of the thread.
        device_type: the device.
        exclusion: a context manager that keeps autocast off.
    """

    def __init__(self, regions: _ThreadRegions, device_type: str, exclusion: AbstractContextManager[Any]) -> None:
        self._regions = regions
        self._device_type = device_type
        self._exclusion = exclusion
        self._innermost = regions.innermost.get(device_type)
        self.outer = regions.kernel.get(device_type)
        self.enabled_after: bool | None = None
        """Whether autocast is on after the kernel; None: as before it."""

    def __enter__(self) -> None:
        self._exclusion.__enter__()
        self._regions.kernel[self._device_type] = self

    def __exit__(self, *error: Any) -> None:
        device_type = self._device_type
        frame = self._regions.innermost.get(device_type)
        has_changed = self.enabled_after is not None or frame is not self._innermost
        enabled = enabled_after = self.enabled_after is not False
        if frame is not None and frame.kernel is self:
            # torch restores the dispatch keys after a dispatch mode, so autocast may be off in a region entered there.
            enabled = frame.settings.enabled
        while frame is not None and frame.kernel is self:
            frame.kernel = self.outer
            if frame.below is None or frame.below.kernel is not self:
                frame.enabled_before = enabled_after
            frame = frame.below
        self._regions.kernel[device_type] = self.outer
        self._exclusion.__exit__(*error)
        if has_changed:
            torch.set_autocast_enabled(device_type, enabled)


class _Regions(threading.local):
    def __init__(self, threads: "set[weakref.ref[_ThreadRegions]]") -> None:
        self.here = _ThreadRegions()
        threads.add(weakref.ref(self.here, threads.discard))


class PythonStateMachine:
    """The state machine in Python."""

    def __init__(self) -> None:
        # Threads start and end at any time. Adding, removing and copying take one call each, which no thread and no
        # finalizer interrupts. Walking a WeakSet takes many, and a finalizer could find a lock held by its own thread.
        self._threads: set[weakref.ref[_ThreadRegions]] = set()
        self._local = _Regions(self._threads)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget_other_threads)

    def _forget_other_threads(self) -> None:
        """Forget the threads that a fork did not copy, whose regions stay alive in the child."""
        mine = self._regions
        self._threads.intersection_update([thread for thread in self._threads.copy() if thread() is mine])

    @property
    def _regions(self) -> _ThreadRegions:
        return self._local.here

    def enter(self, owner: object, settings: Settings) -> bool:
        """See :class:`StateMachine`, as for the other methods."""
        regions = self._regions
        device_type = settings.device_type
        frame = Frame(owner, settings, regions.innermost.get(device_type), regions.kernel.get(device_type))
        regions.push(frame)
        torch.set_autocast_enabled(device_type, settings.enabled)
        torch.set_autocast_dtype(device_type, settings.dtype)
        if settings.cache_enabled is not None:
            torch.set_autocast_cache_enabled(settings.cache_enabled)
        torch.autocast_increment_nesting()
        return is_function_mode_enabled()

    def leave(self, owner: object) -> bool | None:
        """Remove a frame, and restore the state before it; if a frame is above it, that one restores it instead."""
        regions = self._regions
        frame = regions.remove(owner)
        if frame is None:
            return None
        if frame.newer is not None:
            frame.newer.cache_enabled_before = frame.cache_enabled_before
        else:
            torch.set_autocast_cache_enabled(frame.cache_enabled_before)
        kernel = regions.kernel_above(frame)
        if kernel is not None:
            kernel.enabled_after = frame.enabled_before
        elif frame.above is not None:
            frame.above.enabled_before = frame.enabled_before
        else:
            torch.set_autocast_enabled(frame.device_type, frame.enabled_before)
        if frame.above is not None:
            frame.above.dtype_before = frame.dtype_before
        else:
            torch.set_autocast_dtype(frame.device_type, frame.dtype_before)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        if regions.newest is None:
            regions.store.clear()
        return is_function_mode_enabled()

    def last(self) -> tuple[object, Settings] | None:
        """Return owner and settings of the last region."""
        frame = self._regions.newest
        return None if frame is None else (frame.owner, frame.settings)

    def without_autocast(self, device_type: str, exclusion: AbstractContextManager[Any]) -> NoAutocast:
        """Return a context manager in which a kernel of a device runs; see :class:`NoAutocast`."""
        return NoAutocast(self._regions, device_type, exclusion)

    def open_regions(self, device_type: str) -> int:
        """Return the number of regions for a device, over all threads."""
        return sum(regions.depth.get(device_type, 0) for regions in self._living())

    def _living(self) -> list[_ThreadRegions]:
        return [regions for thread in self._threads.copy() if (regions := thread()) is not None]

    def innermost(self, device_type: str) -> tuple[Override | None, CastCache | None]:
        """Return override and cache of the innermost region for a device."""
        frame = self._regions.innermost.get(device_type)
        return (None, None) if frame is None else (frame.override, frame.cache)

    def nesting(self, device_type: str) -> int:
        """Return the number of regions for a device."""
        return self._regions.depth.get(device_type, 0)

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

    def weight_caster(self, device_type: str) -> _CastWeight | None:
        """Return what casts a weight or a view in this thread's region, and keeps the cast; None where it is in none.

        It is given the weight that the tensor is or is a view of. The history of a view is that of one use, as torch's
        is: to share one would add up the gradients of several uses in the fast dtype.
        """
        if not self.nesting(device_type):
            return None
        _, cache = self.innermost(device_type)
        own = self._regions.store
        store = own if cache is None else self.store(cache)

        def cast(tensor: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
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
