"""Notify the observer of the module that computes, while something observes modules.

``nn.Module.__call__`` is wrapped for that. Global hooks would make Dynamo recompile when they come and go, raise
warnings in compiled code, and not run when KeyboardInterrupt leaves a module.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from polycast.plugin import Event

from .observer_library import load_observer
from .recorder import Observer

before: Event[Callable[[nn.Module, nn.Module], object]] = Event()
"""Called before a module computes, with it and with the outermost module that this thread called."""
after: Event[Callable[[], object]] = Event()
"""Called after a module has computed; they may raise."""


class _Thread(threading.local):
    outermost: nn.Module | None = None


_thread = _Thread()
_original_call: Callable[..., Any] = nn.Module.__call__
_active_wrapper: Callable[..., Any] | None = None
_is_buried = False
"""Whether another library's wrapper is over ours, which was therefore not removed."""
_observer: Observer


def _wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or _active_wrapper is not _wrapper:
        return _original_call(self, *args, **kwargs)
    return _notify(_original_call, self, args, kwargs)


def _new_wrapper(below: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper for when `_wrapper` is buried. Dynamo guards its closure, so `_wrapper` is preferred."""

    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _active_wrapper is not wrapper:
            return below(self, *args, **kwargs)
        return _notify(below, self, args, kwargs)

    wrapper.below = below  # type: ignore[attr-defined]
    return wrapper


def _notify(call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    outermost = _thread.outermost
    if before:
        before.notify(module, module if outermost is None else outermost)
    if outermost is None:
        _thread.outermost = module
    _observer.enter_module(module)
    try:
        result = call(module, *args, **kwargs)
    finally:
        _observer.leave_module(module)
        if outermost is None:
            _thread.outermost = None
    if after:
        after.notify()
    return result


def _wrap() -> None:
    global _original_call, _active_wrapper, _observer
    _observer = load_observer()
    call = nn.Module.__call__
    if call is _wrapper:
        _active_wrapper = call
    elif _is_buried:
        _active_wrapper = _new_wrapper(call)
    else:
        _original_call, _active_wrapper = call, _wrapper
    nn.Module.__call__ = _active_wrapper  # type: ignore[method-assign]


def _unwrap() -> None:
    global _active_wrapper, _is_buried
    wrapper, _active_wrapper = _active_wrapper, None
    # A wrapper over ours still calls it, and cannot be removed.
    is_on_top = nn.Module.__call__ is wrapper
    if wrapper is _wrapper:
        _is_buried = not is_on_top
    if is_on_top:
        nn.Module.__call__ = getattr(wrapper, "below", _original_call)  # type: ignore[method-assign]


observations: Event[object] = Event(_wrap, _unwrap)
"""The observations that need to know the module that computes."""
