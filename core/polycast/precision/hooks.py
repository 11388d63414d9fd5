"""Watch the calls of a model's modules, in chosen threads, for the duration of a block."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch

CallKey = tuple[tuple[int, int], ...]
"""Identifies a call: for each call around it and itself the id of the module, and its number within the caller."""


class Watcher(Protocol):
    """Is notified of the calls of modules."""

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call; return what a forward pre-hook may return."""

    def leave(self, module: torch.nn.Module, output: Any) -> None:
        """Handle the return of a call."""


def uncompiled() -> AbstractContextManager[object]:
    """Return a context manager in which compiled code runs eagerly."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and its import takes a second
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def watched(model: torch.nn.Module, watcher_here: Callable[[], Watcher | None]) -> Iterator[None]:
    """Notify the watcher of the current thread, if it has one, of each call of a module, outside of all other hooks.

    Compiled modules run eagerly in the block, so that their modules are called one by one.
    """

    def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        watcher = watcher_here()
        return None if watcher is None else watcher.enter(module, args, kwargs)

    def leave(module: torch.nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        watcher = watcher_here()
        if watcher is not None:
            watcher.leave(module, output)

    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks; counts as a part of its caller
                continue
            first = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            stack.callback(first.remove)
            last = module.register_forward_hook(leave, with_kwargs=True)
            stack.callback(last.remove)
        yield


def in_this_thread(watcher: Watcher) -> Callable[[], Watcher | None]:
    """Return a function that returns the watcher in this thread, and None in others."""
    thread = threading.get_ident()
    return lambda: watcher if threading.get_ident() == thread else None


class OpenCall:
    """A call of a module that has not returned yet."""

    def __init__(self, key: CallKey, module: torch.nn.Module) -> None:
        self.key, self.module = key, module
        self._counts: dict[int, int] = {}

    def key_inside(self, module: torch.nn.Module) -> CallKey:
        """Return the key of the next call of a module inside this one."""
        count = self._counts.get(id(module), 0)
        self._counts[id(module)] = count + 1
        return (*self.key, (id(module), count))


def innermost_common(one: CallKey, two: CallKey) -> CallKey:
    """Return the key of the innermost call around both, which may be one of them."""
    length = 0
    while length < min(len(one), len(two)) and one[length] == two[length]:
        length += 1
    return one[:length]
