"""Notify the observer of the module that computes, while something observes modules.

``nn.Module.__call__`` is wrapped for that. Global hooks would make Dynamo recompile when they come and go, raise
warnings in compiled code, and not run when KeyboardInterrupt leaves a module.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from polycast import rules_of
from polycast.plugin import Feature, Patch, events

from .observer_library import load_observer
from .recorder import ModuleName, Observer, Recorder


def _notify_of_compilations(patch: Patch) -> None:
    """Wrap the callbacks that Dynamo calls before and after it compiles."""
    from torch._dynamo.callback import CompilationCallbackHandler

    handler = CompilationCallbackHandler
    patch.replace(handler, "install_callbacks", _notifying(handler.install_callbacks))


def _notifying(install_callbacks: Callable[..., AbstractContextManager[Any]]) -> Callable[..., Any]:
    @contextmanager
    def notifying(*args: Any, **kwargs: Any) -> Iterator[None]:
        with compiling.during(), install_callbacks(*args, **kwargs):
            yield

    return notifying


_CALLBACKS = "torch._dynamo.callback"
_INSTALL = f"{_CALLBACKS}.CompilationCallbackHandler.install_callbacks"
_COMPILATIONS = Feature(
    "compilations",
    "polycast.observe also counts ops that the compiler runs.",
    ((_CALLBACKS, (_INSTALL,), _notify_of_compilations),),
    outlives_uninstall=True,
)
compiling: events.Event[Callable[[bool], object]] = events.Event(_COMPILATIONS.make, _COMPILATIONS.undo)
"""True when a compiler begins to run on a thread, on that thread, and False when it ends."""


class KnownModules:
    """Gives modules the numbers by which a recorder counts. Modules are held weakly."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.named: list[ModuleName] = []
        """By number."""
        self._numbers: dict[str, int] = {}
        self._alive: dict[int, weakref.ref[nn.Module]] = {}
        self._roots: dict[str, weakref.ref[nn.Module]] = {}
        self._models: dict[str, weakref.ref[nn.Module]] = {}
        self._unnamed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._lock = threading.RLock()

    def add(self, model: nn.Module, name: str = "") -> None:
        """Add a model, by a name, and the modules in it."""
        for path, module in model.named_modules():
            full = _joined(name, path)
            if full not in self._numbers:
                self._numbers[full] = len(self.named)
                self.named.append(ModuleName(full, type(module).__name__))
            number = self._numbers[full]
            self._alive[id(module)] = weakref.ref(module, self._forget(id(module)))
            self._recorder.add_module(id(module), number)
            for parameter in module.parameters(recurse=False):
                self._recorder.add_parameter(parameter, number)
        self._models[name] = weakref.ref(model)
        self._note_rules_of(model, name)

    def note_rules(self) -> None:
        """Note the rules that modules have now; a module that has none keeps the one that it had."""
        for name, model in self._models.copy().items():
            if (alive := model()) is not None:
                with suppress(RuntimeError):  # another thread adds modules
                    self._note_rules_of(alive, name)

    def _note_rules_of(self, model: nn.Module, name: str) -> None:
        for path, rule in rules_of(model).items():
            number = self._numbers.get(_joined(name, path))
            if number is not None:
                self.named[number] = self.named[number]._replace(rule=rule)

    def add_called(self, module: nn.Module, root: nn.Module) -> None:
        """Add a called module by its path in `root`, the module that the program called, named after its class."""
        if id(module) in self._alive or module in self._unnamed:
            return
        with self._lock:
            try:
                if module is root or any(module is each for each in root.modules()):
                    self.add(root, self._name_of(root))
            except Exception:  # raised by the module's own code
                pass
            if id(module) not in self._alive:
                self._unnamed.add(module)

    def _name_of(self, root: nn.Module) -> str:
        kind = type(root).__name__
        name, count = kind, 1
        while (known := self._roots[name]() if name in self._roots else None) is not None and known is not root:
            count += 1
            name = f"{kind}#{count}"
        self._roots[name] = weakref.ref(root)
        return name

    def clear(self) -> None:
        """Drop the weak references, and their callbacks."""
        self._alive.clear()

    def _forget(self, address: int) -> Callable[[object], None]:
        recorder, alive = self._recorder, self._alive

        def forget(_: object) -> None:
            alive.pop(address, None)
            recorder.forget_module(address)

        return forget


def _joined(name: str, path: str) -> str:
    return f"{name}.{path}" if name and path else name or path


before: events.Event[Callable[[nn.Module, nn.Module], object]] = events.Event()
"""Called before a module computes, with it and with the outermost module that this thread called."""
after: events.Event[Callable[[], object]] = events.Event()
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


observations: events.Event[object] = events.Event(_wrap, _unwrap)
"""The observations that need to know the module that computes."""
