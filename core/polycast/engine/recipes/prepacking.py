"""Why a weight is not prepacked, as messages; and caching what several threads prepack at once.

A thread that prepacks a weight, or caches what was made of a view of it, holds a second reference to its storage. Other
threads cannot tell this from an alias through which the weight may be written unseen, and would cache nothing of it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...common.atfork import call_in_forked_child
from .. import state
from ..casts.cast_cache import CastCache

NOT_PREPACKED = {
    "INTERCEPTED": "something records, transforms or watches the ops",
    "NO_WEIGHT": (
        "its weight is not a cacheable parameter or a plain view of one (it is a subclass, or the result of an op)"
    ),
    "NOT_CACHED": "weights are not cached here (cache_enabled=False, or a device's graph is being captured)",
    "WRITTEN_UNSEEN": (
        "something else holds the weight's memory and may write it unseen (an alias made through .data, an array, a "
        "buffer that it is a part of, another process)"
    ),
    "NO_ROOM": "the WeightCache has no room for its prepacked weight within max_bytes",
    "VIEWS_ARE_FULL": "the prepacked views of its weight take as much memory as the weight",
}
"""By name, in the order of the native engine's enumeration (native/recipes/prepacked.h), which checks it."""
INTERCEPTED, NO_WEIGHT, NOT_CACHED, WRITTEN_UNSEEN, *_ = NOT_PREPACKED.values()

_now: list[int] = []
"""The identities of the weights that are prepacked now, each as often as there are threads that do so."""
_last_end = [object()]
"""Another object whenever a thread has ended prepacking."""
call_in_forked_child(_now.clear)


def _identity(weight: torch.Tensor) -> int:
    return id(weight if weight._base is None else weight._base)


@contextmanager
def _holding(identity: int) -> Iterator[None]:
    """Tell other threads that this one may hold the storage of a weight, given its identity."""
    try:
        _now.append(identity)  # in the block: once it is there, no KeyboardInterrupt may leave it there
        yield
    finally:
        if identity in _now:  # not in a child that was forked meanwhile
            _now.remove(identity)
        _last_end[0] = object()


def undisturbed(weight: torch.Tensor, attempt: Callable[[], bool | None]) -> bool:
    """Return whether an attempt to cache something of a weight succeeds. It is repeated while it returns False.

    Other threads may prepack the weight, or make a view of it now, which looks like an alias until torch has completed
    it. None of them waits while it holds the weight, or two would wait for each other.
    """
    held_attempt, attempts_left = _holding(_identity(weight))(attempt), 50
    while (is_cached := held_attempt()) is False and attempts_left:
        time.sleep(0.001)
        attempts_left -= _identity(weight) not in _now  # not while another thread prepacks it
    return bool(is_cached)


def prepacked(
    cache: CastCache, weight: torch.Tensor, prepack_id: int, prepack: Callable[[torch.Tensor], Any]
) -> tuple[torch.Tensor, ...] | str | None:
    """Return a prepacked weight, as `StateMachine.prepacked` does, also while other threads prepack it.

    If another thread prepacks the same weight now, the result is not cached: that thread caches its own.
    """

    def make(weight: torch.Tensor) -> Any:
        with _holding(_identity(weight)):
            return prepack(weight)

    while True:
        last_end = _last_end[0]
        found = state.machine.prepacked(cache, weight, prepack_id, make)
        if found is WRITTEN_UNSEEN and _identity(weight) in _now:
            return make(weight) or None
        if found is not WRITTEN_UNSEEN or _last_end[0] is last_end:
            return found
