"""Run the body of a function in regions.

The body of a generator or a coroutine runs in steps. The regions are entered for each step and left when it is
suspended, so that the caller and the event loop are not in them.
"""

import functools
import inspect
import sys
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from .suspend import Suspendable

_F = TypeVar("_F", bound=Callable[..., Any])


def in_block(region: AbstractContextManager[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of plain functions, which run in a ``with`` block of a region."""

    def wrap(func: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with region:
                return func(*args, **kwargs)

        return call

    return wrap


def decorate(
    func: _F, wrap_plain: Callable[[Callable[..., Any]], Callable[..., Any]], suspendable: Callable[[], Suspendable]
) -> _F:
    """Return `func` wrapped so that its body runs in regions.

    Args:
        func: a function, generator function, coroutine function or asynchronous generator function.
        wrap_plain: decorates a plain function.
        suspendable: returns the context manager for the steps of other bodies; called once for each body.
    """
    is_function = inspect.isroutine(func) or isinstance(func, functools.partial)
    kind = func if is_function else type(func).__call__

    if inspect.isasyncgenfunction(kind):

        async def async_steps(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            body: AsyncGenerator[Any, Any] = func(*args, **kwargs)
            active = suspendable()
            try:
                item = await _Stepwise(_first_step(body), active)
                while True:
                    try:
                        sent = yield item
                    except GeneratorExit:
                        await _Stepwise(body.aclose(), active)
                        raise
                    except BaseException as error:  # the body sees what the caller throws
                        item = await _Stepwise(body.athrow(error), active)
                    else:
                        item = await _Stepwise(body.asend(sent), active)
            except StopAsyncIteration:
                return

        wrapper: Any = async_steps
    elif inspect.iscoroutinefunction(kind):

        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await _Stepwise(func(*args, **kwargs), suspendable())

        wrapper = coroutine
    elif inspect.isgeneratorfunction(kind):

        def steps(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            return (yield from _steps(func(*args, **kwargs), suspendable()))

        wrapper = types.coroutine(steps) if _can_be_awaited(kind) else steps
    else:
        wrapper = wrap_plain(func)
    functools.update_wrapper(wrapper, func)
    # torch.jit.script raises an error with this text.
    setattr(wrapper, "__script_unsupported", "@autocast() decorator is not supported in script mode")
    return cast("_F", wrapper)


def _first_step(body: AsyncGenerator[Any, Any]) -> Awaitable[Any]:
    """Return the first step of a generator, unknown to the event loop, which would close it before the wrapper does."""
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        return body.__anext__()
    finally:
        sys.set_asyncgen_hooks(*hooks)


def _can_be_awaited(generator_function: Any) -> bool:
    """Return whether ``types.coroutine`` has made a generator function's generators awaitable."""
    while not hasattr(generator_function, "__code__"):  # inspect looks into these two as well
        partial = isinstance(generator_function, functools.partial)
        generator_function = generator_function.func if partial else generator_function.__func__
    return bool(generator_function.__code__.co_flags & inspect.CO_ITERABLE_COROUTINE)


class _Stepwise:
    """Await an awaitable with regions active only while it runs."""

    def __init__(self, body: Awaitable[Any], active: Suspendable) -> None:
        self._body = body
        self._active = active

    def __await__(self) -> Generator[Any, Any, Any]:
        return _steps(self._body, self._active)


def _steps(body: Any, active: Suspendable) -> Generator[Any, Any, Any]:
    """Run a generator or a coroutine as ``yield from`` does, each step in `active`."""
    try:
        item = active.call(body.send, None)
        while True:
            try:
                sent = yield item
            except GeneratorExit:
                active.call(body.close)
                raise
            except BaseException as error:  # the body sees what the caller throws
                item = active.call(body.throw, error)
            else:
                item = active.call(body.send, sent)
    except StopIteration as stop:
        return stop.value
