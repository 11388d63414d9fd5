"""Prepacking by several threads at once.

While a thread prepacks a weight, it holds a second reference to the weight's storage. Another thread cannot tell this
from an alias through which the weight may be written unseen, and would not prepack it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import state
from ..casts.cast_cache import CastCache
from ..casts.not_prepacked import WRITTEN_UNSEEN


class _WeightsBeingPrepacked:
    """The weights that threads prepack now."""

    def __init__(self) -> None:
        self.last_end = object()  # another whenever a thread has ended
        self._now: list[int] = []  # the identities of the weights, each as often as there are threads

    @contextmanager
    def of(self, weight: torch.Tensor) -> Iterator[None]:
        identity = _identity(weight)
        self._now.append(identity)
        try:
            yield
        finally:
            if identity in self._now:  # not in a child that was forked meanwhile
                self._now.remove(identity)
            self.last_end = object()

    def has(self, weight: torch.Tensor) -> bool:
        return _identity(weight) in self._now

    def forget(self) -> None:
        self._now = []


_progress = _WeightsBeingPrepacked()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_progress.forget)  # other threads do not exist there


def _identity(weight: torch.Tensor) -> int:
    base = weight._base
    return id(weight if base is None else base)


def prepacked(
    cache: CastCache, weight: torch.Tensor, prepack_id: int, prepack: Callable[[torch.Tensor], Any]
) -> tuple[torch.Tensor, ...] | str | None:
    """Return a prepacked weight, as `StateMachine.prepacked` does, also while other threads prepack it.

    If another thread prepacks the same weight now, the result is not cached: that thread caches its own.
    """

    def make(weight: torch.Tensor) -> Any:
        with _progress.of(weight):
            return prepack(weight)

    while True:
        last_end = _progress.last_end
        found = state.machine.prepacked(cache, weight, prepack_id, make)
        if found is not WRITTEN_UNSEEN:
            return found
        if _progress.has(weight):
            return make(weight) or None
        if _progress.last_end is last_end:
            return found
