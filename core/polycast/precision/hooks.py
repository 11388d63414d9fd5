"""Watch the calls of a model's modules, in chosen threads, for the duration of a block."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch

CallKey = tuple[tuple[str, int], ...]
"""Identifies a call: for each call around it and itself the name of the module, and its number within the caller."""
COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module that was compiled in place: what is called instead of its forward."""


class Watcher(Protocol):
    """Is notified of the calls of modules."""

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call; return what a forward pre-hook may return."""

    def leave(self, module: torch.nn.Module, output: Any) -> Any:
        """Handle the return of a call; return what a forward hook may return."""


def set_stance(stance: str) -> AbstractContextManager[object]:
    """Set how compiled code runs, and return a context manager that restores it at its end."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and its import takes a second
        return nullcontext()
    set_to: AbstractContextManager[object] = torch.compiler.set_stance(stance)
    return set_to


def run_eagerly() -> AbstractContextManager[object]:
    """Return a context manager in which compiled code runs eagerly."""
    return set_stance("force_eager")


@contextmanager
def watched(model: torch.nn.Module, watcher_here: Callable[[], Watcher | None]) -> Iterator[None]:
    """Notify the watcher of the current thread, if it has one, of each call of a module, outside of all other hooks.

    Compiled modules run eagerly in the block, so that their modules are called one by one.
    """
    with run_eagerly(), watched_modules(model.modules(), watcher_here):
        yield


@contextmanager
def watched_modules(modules: Iterable[torch.nn.Module], watcher_here: Callable[[], Watcher | None]) -> Iterator[None]:
    """Notify the watcher of the current thread, if it has one, of each call of some modules.

    A module that was compiled in place, whose hooks are part of the compiled code, is watched around that code.
    """

    def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # nothing in compiled code is watched
            return None
        watcher = watcher_here()
        return None if watcher is None else watcher.enter(module, args, kwargs)

    def leave(module: torch.nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        watcher = watcher_here()
        return None if watcher is None else watcher.leave(module, output)

    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks; counts as a part of its caller
                continue
            compiled = vars(module).get(COMPILED_CALL)
            if compiled is not None:
                vars(module)[COMPILED_CALL] = _Around(module, compiled, enter, leave)
                stack.callback(vars(module).__setitem__, COMPILED_CALL, compiled)
                continue
            first = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            stack.callback(first.remove)
            last = module.register_forward_hook(leave, with_kwargs=True)
            stack.callback(last.remove)
        yield


class _Around:
    """The compiled call of a module, with a notification before and after it."""

    def __init__(self, module: torch.nn.Module, compiled: Callable[..., Any], enter: Any, leave: Any) -> None:
        self._module, self._compiled, self._enter, self._leave = module, compiled, enter, leave

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._enter(self._module, args, kwargs) or (args, kwargs)
        output = self._compiled(*args, **kwargs)
        other = self._leave(self._module, args, kwargs, output)
        return output if other is None else other


def in_this_thread(watcher: Watcher) -> Callable[[], Watcher | None]:
    """Return a function that returns the watcher in this thread, and None in others."""
    thread = threading.get_ident()
    return lambda: watcher if threading.get_ident() == thread else None


class OpenCall:
    """A call of a module that has not returned yet; one without a module is around all others."""

    def __init__(self, key: CallKey, module: torch.nn.Module | None) -> None:
        self.key, self.module = key, module
        self._counts: dict[str, int] = {}

    def key_inside(self, name: str) -> CallKey:
        """Return the key of the next call of a module inside this one."""
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        return (*self.key, (name, count))


def innermost_common(one: CallKey, two: CallKey) -> CallKey:
    """Return the key of the innermost call around both, which may be one of them."""
    length = 0
    while length < min(len(one), len(two)) and one[length] == two[length]:
        length += 1
    return one[:length]
