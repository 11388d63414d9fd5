"""Tell inference from computations that may need gradients."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..torch_internals.private_names import current_graph_task_id, is_fwd_grad_enabled
from . import state


class _Thread(threading.local):
    forward: tuple[int, bool] | None = None
    """In a recomputed forward: the backward that recomputes it, and whether an autograd.Function ran it at first."""


_thread = _Thread()


def in_function() -> bool:
    """Return whether an autograd.Function is running, forward or backward, so that gradients may be needed.

    Its forward runs without a graph, as inference does. But autograd disables forward-mode AD there, as only inference
    mode does otherwise.
    """
    if not is_fwd_grad_enabled():
        return not torch.is_inference_mode_enabled()
    backward = current_graph_task_id()
    if _thread.forward is not None and _thread.forward[0] == backward:
        return _thread.forward[1]
    return backward != -1


@contextmanager
def as_in_forward(in_function: bool) -> Iterator[None]:
    """Treat what a backward recomputes as its forward was: run by an autograd.Function or not."""
    before, backward = _thread.forward, current_graph_task_id()
    try:
        _thread.forward = backward, in_function
        state.machine.set_recomputing(backward)
        yield
    finally:
        _thread.forward = before
        state.machine.set_recomputing(None if before is None else before[0])
