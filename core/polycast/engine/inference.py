"""Whether what is computed now is inference, or something that gradients may come of."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..torch_internals.names import current_graph_task_id, is_fwd_grad_enabled


class _Thread(threading.local):
    forward: tuple[int, bool] | None = None
    """Where a forward runs again in a backward: which backward, and whether a function of autograd's ran it first."""


_thread = _Thread()


def in_function() -> bool:
    """Say whether a function of autograd's computes now, forward or backward, so that gradients may come of it.

    Its forward runs without a graph, as inference does. But there autograd switches off forward mode too, which else
    only inference mode does.
    """
    if not is_fwd_grad_enabled():
        return not torch.is_inference_mode_enabled()
    backward = current_graph_task_id()
    if _thread.forward is not None and _thread.forward[0] == backward:
        return _thread.forward[1]
    return backward != -1


@contextmanager
def as_in_forward(in_function: bool) -> Iterator[None]:
    """Have what a backward runs again computed as its forward was, in a function of autograd's or not."""
    before = _thread.forward
    _thread.forward = current_graph_task_id(), in_function
    try:
        yield
    finally:
        _thread.forward = before
