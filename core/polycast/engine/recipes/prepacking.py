"""Why a weight is not prepacked, as messages; and prepacking by several threads at once.

While a thread prepacks a weight, it holds a second reference to the weight's storage. Another thread cannot tell this
from an alias through which the weight may be written unseen, and would not prepack it.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

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
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_now.clear)  # other threads do not exist there


def prepacked(
    cache: CastCache, weight: torch.Tensor, prepack_id: int, prepack: Callable[[torch.Tensor], Any]
) -> tuple[torch.Tensor, ...] | str | None:
    """Return a prepacked weight, as `StateMachine.prepacked` does, also while other threads prepack it.

    If another thread prepacks the same weight now, the result is not cached: that thread caches its own.
    """
    identity = id(weight if weight._base is None else weight._base)

    def make(weight: torch.Tensor) -> Any:
        _now.append(identity)
        try:
            return prepack(weight)
        finally:
            if identity in _now:  # not in a child that was forked meanwhile
                _now.remove(identity)
            _last_end[0] = object()

    while True:
        last_end = _last_end[0]
        found = state.machine.prepacked(cache, weight, prepack_id, make)
        if found is not WRITTEN_UNSEEN:
            return found
        if identity in _now:
            return make(weight) or None
        if _last_end[0] is last_end:
            return found
