"""What the reference engine tells the recorders of its casts and regions while somebody observes."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from ...common.atfork import hold_during_fork
from ..state import Override


class Listener(Protocol):
    """Who is told."""

    def note_override(self, override: Override, /) -> None:
        """The op that runs now has its policy from an override."""

    def note_cast(
        self, tensor: torch.Tensor, cast: torch.Tensor, of_weight: bool, found: bool | None, seconds: float, /
    ) -> None:
        """An input of the op that runs now was cast, or its cast was found; `found` is None if none is kept."""

    def note_entry(self, region: int, device_type: str, enabled: bool, dtype: torch.dtype, /) -> None:
        """A region was entered; `region` is a number of its own."""

    def note_exit(self, region: int, /) -> None:
        """It was left."""


listener: Listener | None = None
"""Who is told now; read once by whoever tells, for an observation may end on another thread meanwhile."""
_lock = threading.RLock()
hold_during_fork(lambda: [_lock])
_count = 0


def tell(new: Listener) -> None:
    """Tell a listener, until :func:`tell_no_more` was called as often."""
    global listener, _count
    with _lock:
        _count += 1
        listener = new


def tell_no_more() -> None:
    """See :func:`tell`."""
    global listener, _count
    with _lock:
        _count -= 1
        if _count == 0:
            listener = None


def told_cast(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    weight: torch.Tensor | None,
    cast_weight: Callable[[torch.Tensor, torch.Tensor, torch.dtype, list[bool] | None], torch.Tensor | None] | None,
    told: Listener,
) -> torch.Tensor:
    """Cast a tensor, one that is a weight or a view of one by what keeps casts, if any does, and tell of it."""
    made: list[bool] = []
    began = time.perf_counter()
    kept = None if weight is None or cast_weight is None else cast_weight(tensor, weight, dtype, made)
    cast = tensor.to(dtype) if kept is None else kept
    found = None if kept is None else not made
    told.note_cast(tensor, cast, weight is not None, found, time.perf_counter() - began)
    return cast
