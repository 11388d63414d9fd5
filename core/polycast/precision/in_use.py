"""The modules that are compared or tuned now, which other threads must not compare at the same time."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..common.atfork import hold_during_fork

_users: dict[int, object] = {}
"""By the id of a module, what identifies the call that uses it."""
_lock = threading.Lock()
hold_during_fork(lambda: [_lock])
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_users.clear)  # the threads that use them are not in the child


@contextmanager
def in_use(*models: torch.nn.Module) -> Iterator[None]:
    """Use models for a block, in which their hooks, state and gradients are replaced.

    Raises:
        RuntimeError: one of them, or a module in it, is in use.
    """
    modules = {id(module): module for model in models for module in model.modules()}
    user = object()
    try:
        with _lock:
            used = next((module for key, module in modules.items() if key in _users), None)
            if used is None:
                _users.update(dict.fromkeys(modules, user))
        if used is not None:
            raise RuntimeError(
                f"{type(used).__name__} is in use by another call of polycast.compare or polycast.tune. Wait for its "
                "end, or pass a copy of the model (copy.deepcopy)."
            )
        yield
    finally:
        with _lock:
            for key in modules:
                if _users.get(key) is user:
                    del _users[key]
