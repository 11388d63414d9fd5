"""Which module computes now, told to the observer while somebody observes a model.

``nn.Module.__call__`` is wrapped meanwhile. Global hooks would do too, but make Dynamo compile again when they come and
go, warn those who call what it compiled, and are not called when KeyboardInterrupt leaves a module.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..common.atfork import hold_during_fork
from ..engine.recorder import Observer

_lock = threading.RLock()
hold_during_fork(lambda: [_lock])
_observers = 0
_modules_call: Callable[..., Any] = nn.Module.__call__
"""What was there before."""
_call_in_force: Callable[..., Any] | None = None
"""The wrapper that tells, of those that are there."""
_stays = False
"""Whether the wrapper is below another's that was not taken out."""
_observer: Observer
before_modules: list[Callable[[nn.Module, nn.Module], None]] = []
"""What is called before each module computes, on its thread, with it and with the outermost one that computes there."""
after_modules: list[Callable[[], None]] = []
"""What is called after each module that computed, on its thread; it may raise."""


class _OfThread(threading.local):
    outermost: nn.Module | None = None


_of_thread = _OfThread()


def _observed_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or _call_in_force is not _observed_call:
        return _modules_call(self, *args, **kwargs)
    return _tell(_modules_call, self, args, kwargs)


def _another_observed_call(modules_call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of what has the usual one below it. Dynamo guards its closure, so it is not the usual one."""

    def observed_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _call_in_force is not observed_call:
            return modules_call(self, *args, **kwargs)
        return _tell(modules_call, self, args, kwargs)

    observed_call.below = modules_call  # type: ignore[attr-defined]
    return observed_call


def _tell(modules_call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    outermost = _of_thread.outermost
    if before_modules:
        for meet in tuple(before_modules):
            meet(module, module if outermost is None else outermost)
    if outermost is None:
        _of_thread.outermost = module
    _observer.enter_module(module)
    try:
        result = modules_call(module, *args, **kwargs)
    finally:
        _observer.leave_module(module)
        if outermost is None:
            _of_thread.outermost = None
    for call in tuple(after_modules):
        call()
    return result


def tell_modules(observer: Observer) -> None:
    """Have the modules that compute told to the process' observer, until :func:`tell_modules_no_more`."""
    global _observers, _modules_call, _call_in_force, _observer
    with _lock:
        if _observers == 0:
            _observer = observer
            call = nn.Module.__call__
            if call is _observed_call:
                _call_in_force = call
            elif _stays:
                _call_in_force = _another_observed_call(call)
            else:
                _modules_call, _call_in_force = call, _observed_call
            nn.Module.__call__ = _call_in_force  # type: ignore[method-assign]
        _observers += 1


def tell_modules_no_more() -> None:
    """Take that back, when all who asked have."""
    global _observers, _call_in_force, _stays
    with _lock:
        _observers -= 1
        if _observers == 0:
            told, _call_in_force = _call_in_force, None
            # What another has put over it calls it still, and takes it out.
            on_top = nn.Module.__call__ is told
            if told is _observed_call:
                _stays = not on_top
            if on_top:
                nn.Module.__call__ = getattr(told, "below", _modules_call)  # type: ignore[method-assign]
