"""Why a weight is not prepacked, as messages; and caching what several threads prepack at once.

While a thread prepacks a weight, or adds what was made of a view of it to a cache, it holds a second reference to its
storage. Another thread cannot tell this from an alias through which the weight may be written unseen, and would cache
nothing of it.
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


@contextmanager
def _holding(weight: torch.Tensor) -> Iterator[int]:
    """Tell other threads that this one may hold the storage of a weight, or of a view of one; yield its identity."""
    identity = id(weight if weight._base is None else weight._base)
    _now.append(identity)
    try:
        yield identity
    finally:
        if identity in _now:  # not in a child that was forked meanwhile
            _now.remove(identity)
        _last_end[0] = object()


def undisturbed(weight: torch.Tensor, attempt: Callable[[], bool]) -> bool:
    """Return what an attempt to cache something of a weight returns, repeated where it may fail for other threads.

    They may prepack the weight, or make a view of it now, which looks like an alias until torch has completed it.
    """
    attempts_left = 50
    with _holding(weight) as identity:
        while attempts_left and not attempt():
            time.sleep(0.001)
            attempts_left -= _now.count(identity) <= 1  # not while another thread prepacks it
    return attempts_left > 0


def prepacked(
    cache: CastCache, weight: torch.Tensor, prepack_id: int, prepack: Callable[[torch.Tensor], Any]
) -> tuple[torch.Tensor, ...] | str | None:
    """Return a prepacked weight, as `StateMachine.prepacked` does, also while other threads prepack it.

    If another thread prepacks the same weight now, the result is not cached: that thread caches its own.
    """

    def make(weight: torch.Tensor) -> Any:
        with _holding(weight):
            return prepack(weight)

    while True:
        last_end = _last_end[0]
        found = state.machine.prepacked(cache, weight, prepack_id, make)
        if found is not WRITTEN_UNSEEN:
            return found
        if id(weight if weight._base is None else weight._base) in _now:
            return make(weight) or None
        if _last_end[0] is last_end:
            return found
