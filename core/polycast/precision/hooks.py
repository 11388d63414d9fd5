"""Seeing each call of a module of a model, in the threads that are asked about and while it lasts."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch

Key = tuple[tuple[int, int], ...]
"""A call of a module: for each call around it and itself the module, and which call of it this is in that one."""


class Watcher(Protocol):
    """What is told of the calls."""

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Be told that a module is called; the answer is what a forward pre-hook may return."""

    def leave(self, module: torch.nn.Module, output: Any) -> None:
        """Be told that a module returns."""


def uncompiled() -> AbstractContextManager[object]:
    """Return a context manager in which what is compiled runs as it was written."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled then, and loading it takes a second
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def watched(model: torch.nn.Module, watcher_here: Callable[[], Watcher | None]) -> Iterator[None]:
    """Tell a watcher, the one that this thread has, of each call of a module: around the hooks that modules have.

    Compiled modules run uncompiled meanwhile, where their modules are called one by one.
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
            if isinstance(module, torch.jit.ScriptModule):  # it takes no hooks; what it does is its caller's
                continue
            first = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            stack.callback(first.remove)
            last = module.register_forward_hook(leave, with_kwargs=True)
            stack.callback(last.remove)
        yield


def here(watcher: Watcher) -> Callable[[], Watcher | None]:
    """Return what gives a watcher in this thread, and none in others."""
    thread = threading.get_ident()
    return lambda: watcher if threading.get_ident() == thread else None


class Open:
    """A call of a module that has not returned yet."""

    def __init__(self, key: Key, module: torch.nn.Module) -> None:
        self.key, self.module = key, module
        self._counts: dict[int, int] = {}

    def key_inside(self, module: torch.nn.Module) -> Key:
        """Return the key of the next call of a module inside this one."""
        count = self._counts.get(id(module), 0)
        self._counts[id(module)] = count + 1
        return (*self.key, (id(module), count))


def common(one: Key, two: Key) -> Key:
    """Return the innermost call around both, which may be one of them."""
    length = 0
    while length < min(len(one), len(two)) and one[length] == two[length]:
        length += 1
    return one[:length]
