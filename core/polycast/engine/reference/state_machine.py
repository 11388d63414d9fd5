"""The state machine in Python: the one to read."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...common.atfork import call_in_forked_child
from ...policy.cast_policy import CastPolicy
from ...torch_internals.dispatcher import excluded_keys
from ...torch_internals.private_names import current_graph_task_id, dispatch_mode_count, is_function_mode_enabled
from ..casts.cached_cast import with_history
from ..casts.cast_cache import CastCache
from ..casts.weights import caching_is_safe, storages_are_rewritten, weight_of
from ..override import Override
from ..recipes.prepacking import INTERCEPTED, NO_WEIGHT, NOT_CACHED
from ..state import Settings, clear_torchs_cache
from .frames import ThreadRegions, WithoutAutocast


class _Thread(threading.local):
    def __init__(self, threads: "set[weakref.ref[ThreadRegions]]") -> None:
        self.regions = ThreadRegions()
        threads.add(weakref.ref(self.regions, threads.discard))


class PythonStateMachine:
    """The state machine in Python."""

    dtype = staticmethod(torch.get_autocast_dtype)
    excluded_keys = staticmethod(excluded_keys)

    def __init__(self) -> None:
        # Threads start and end at any time. Adding, removing and copying take one call each, which no thread and no
        # finalizer interrupts. Walking a WeakSet takes many, and a finalizer could find a lock held by its own thread.
        self._threads: set[weakref.ref[ThreadRegions]] = set()
        self._thread = _Thread(self._threads)
        call_in_forked_child(self._forget_other_threads)

    def _forget_other_threads(self) -> None:
        """Forget the threads that a fork did not copy, whose regions stay alive in the child."""
        mine = self._thread.regions
        self._threads.intersection_update([thread for thread in self._threads.copy() if thread() is mine])

    def enter(self, owner: object, settings: Settings) -> bool:
        """See :class:`StateMachine`, as for the other methods."""
        self._thread.regions.push(owner, settings)
        if settings.cache_enabled is not None:
            torch.set_autocast_cache_enabled(settings.cache_enabled)
        torch.autocast_increment_nesting()
        return is_function_mode_enabled()

    def leave(self, owner: object) -> bool | None:
        """Remove the frame of a region, and drop what is kept until the last one is left."""
        regions = self._thread.regions
        if not regions.pop(owner):
            return None
        if torch.autocast_decrement_nesting() == 0:
            clear_torchs_cache()
        if regions.last() is None:
            regions.histories = {}
        return is_function_mode_enabled()

    def last(self) -> tuple[object, Settings] | None:
        """Return owner and settings of the last region."""
        frame = self._thread.regions.last()
        return None if frame is None else (frame.owner, frame.settings)

    def without_autocast(self, device_type: str) -> WithoutAutocast:
        """Return a context manager in which a kernel of a device runs."""
        return WithoutAutocast(self._thread.regions, device_type)

    def runs_kernel(self, device_type: str) -> bool:
        """Return whether a kernel of a device runs on this thread."""
        return self._thread.regions.count(device_type, kernels=True) > 0

    def open_regions(self, device_type: str) -> int:
        """Return the number of regions for a device, over all threads."""
        return sum(regions.count(device_type) for regions in self._living())

    def _living(self) -> list[ThreadRegions]:
        return [regions for thread in self._threads.copy() if (regions := thread()) is not None]

    def innermost(self, device_type: str) -> tuple[Override | None, CastCache | None]:
        """Return override and cache of the innermost region for a device."""
        frame = self._thread.regions.last(device_type)
        return (None, None) if frame is None else (frame.override, frame.cache)

    def nesting(self, device_type: str) -> int:
        """Return the number of regions for a device."""
        return self._thread.regions.count(device_type)

    def matches(self, device_type: str) -> bool:
        """Return whether MATCH casts now: in regions of polycast, not in torch's own.

        A backward pass and a traced graph count as the former: they may run the ops of a region of polycast in one of
        torch's.
        """
        here = self._thread.regions.last(device_type)
        return here is not None or current_graph_task_id() >= 0 or dispatch_mode_count() > 0

    def forget_actions(self) -> None:
        """Do nothing: this engine keeps no actions."""

    def set_recomputing(self, backward: int | None) -> None:
        """Do nothing: Python decides each call in this engine."""

    def clear_own_casts(self, all_threads: bool) -> None:
        """Drop the histories of casts of this thread's regions, or of all threads'."""
        for regions in self._living() if all_threads else [self._thread.regions]:
            regions.histories = {}

    def region_methods(self, *_: object) -> None:
        """Return None: regions use the methods in Python."""

    def policy(self, name: str, device_type: str, default: CastPolicy | None) -> CastPolicy | None:
        """Return the policy of an op in this thread's region."""
        override, _ = self.innermost(device_type)
        return default if override is None else override.policies.get(name, default)

    def prepacked(
        self, cache: CastCache, weight: torch.Tensor, prepack_id: int, prepack: Callable[[torch.Tensor], Any]
    ) -> tuple[torch.Tensor, ...] | str | None:
        """See :class:`StateMachine`. This engine prepacks a weight at each use."""
        if not caching_is_safe():
            return INTERCEPTED
        if weight_of(weight, for_prepacking=True) is None:
            return NO_WEIGHT
        if not torch.is_autocast_cache_enabled():
            return NOT_CACHED
        prepacked: tuple[torch.Tensor, ...] | None = prepack(weight)
        return prepacked

    def register_recipe_op(self, *_: object) -> None:
        """Do nothing: the operators run in Python."""

    def store(self, cache: CastCache) -> None:
        """Return None: this engine caches nothing."""

    def has_recipe(self, name: str, device_type: str) -> bool:
        """Return whether the recipe of this thread's region computes an op."""
        override, _ = self.innermost(device_type)
        return override is not None and name in override.recipe_ops

    def cast_with_history(self, weight: torch.Tensor, dtype: torch.dtype, device_type: str) -> torch.Tensor:
        """Return a new cast of a weight, whose history all its uses in this thread's regions share.

        As in torch, their gradients are summed in the fast dtype. torch shares the cast too, which a write makes stale.
        FSDP takes gradients as soon as the uses in a module have theirs, so where it may be in use, none is shared.
        """
        regions = self._thread.regions
        if regions.last(device_type) is None or storages_are_rewritten():
            return weight.to(dtype)
        histories, key = regions.histories, (id(weight), dtype)
        cast = weight.detach().to(dtype)  # not under no_grad, which a signal handler could leave on
        _, history = histories.pop(key, (weight, None))
        if history is None or (history.shape, history.device) != (weight.shape, weight.device):
            history = None  # one for other sizes is freed first, since autograd shares its end with the next
            history = with_history(weight, torch.empty((), dtype=dtype, device=weight.device).expand(weight.shape))
        histories[key] = weight, history
        return with_history(history, cast)
