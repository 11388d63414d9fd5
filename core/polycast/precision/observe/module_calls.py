"""Which module computes now, told to the engine while somebody observes a model.

``nn.Module.__call__`` is wrapped meanwhile. Global hooks would do too, but make Dynamo compile again when they come and
go, warn those who call what it compiled, and are not called when KeyboardInterrupt leaves a module.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...engine.choice import Engine, choose
from ...plugins.fork import hold_over_forks

_lock = threading.RLock()
hold_over_forks(lambda: [_lock])
_observers = 0
_modules_call: Callable[..., Any] = nn.Module.__call__
"""What was there before."""
_engine: Engine
after_modules: list[Callable[[], None]] = []
"""What is called after each module that computed, on its thread; it may raise."""


def _observed_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or not _observers:
        return _modules_call(self, *args, **kwargs)
    _engine.enter_module(self)
    try:
        result = _modules_call(self, *args, **kwargs)
    finally:
        _engine.leave_module(self)
    for call in after_modules:
        call()
    return result


def tell_modules() -> None:
    """Have the modules that compute told to the engine, until :func:`tell_modules_no_more`."""
    global _observers, _modules_call, _engine
    with _lock:
        if _observers == 0 and nn.Module.__call__ is not _observed_call:
            _engine, _modules_call = choose(), nn.Module.__call__
            nn.Module.__call__ = _observed_call  # type: ignore[method-assign]
        _observers += 1


def tell_modules_no_more() -> None:
    """Take that back, when all who asked have."""
    global _observers
    with _lock:
        _observers -= 1
        # What another has put over it calls it still, and takes it out.
        if _observers == 0 and nn.Module.__call__ is _observed_call:
            nn.Module.__call__ = _modules_call  # type: ignore[method-assign]
