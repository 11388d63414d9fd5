"""Prepacking by several threads at once.

While a thread prepacks a weight, it holds a second reference to the weight's storage. Another thread cannot tell this
from an alias through which the weight may be written unseen, and would not prepack it.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from .. import state
from ..casts.cast_cache import CastCache
from ..casts.not_prepacked import WRITTEN_UNSEEN

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
