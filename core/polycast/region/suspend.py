"""Regions that are entered together: for a block, a function, or each step of a body that is suspended between steps.

The regions of a generator or a coroutine are entered for each step and left when it is suspended, so that the caller
and the event loop are not in them.
"""

import functools
import inspect
import sys
import threading
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any, TypeVar, cast

import torch
from typing_extensions import Self

from ..engine import state
from ..engine.state import Settings
from ..torch_internals.private_names import disable_dynamo
from . import switched_off
from .resolve import enter, leave

_F = TypeVar("_F", bound=Callable[..., Any])


class Regions(ContextDecorator):
    """Regions that are entered for a block, and left after it. Regions that the block leaves open stay open.

    They are in one block at a time. As a decorator of a function, new ones are entered for each call.

    Args:
        regions: what to enter.
        around: returns other regions to enter around these, whenever they are entered.
        off_by_rule: the devices that a module rule has switched autocast off for; None: those on the entering thread.
    """

    def __init__(
        self,
        *regions: Settings,
        around: Callable[[], Iterable[Settings]] | None = None,
        off_by_rule: Collection[str] | None = None,
    ) -> None:
        self._regions: Sequence[Settings] = regions
        self._around = around
        self._off_by_rule = off_by_rule
        self._owner, self._owner_around = object(), object()  # not self, in a cycle with what it suspends
        self._is_in_use = threading.Lock()
        self._thread: int | None = None  # which has entered them
        self._entered: list[object] = []
        """The owners of these regions and those around them; the last may not be entered yet."""

    @disable_dynamo
    def __enter__(self) -> None:
        if not self._is_in_use.acquire(blocking=False):
            raise RuntimeError(
                "the regions of a snapshot are entered already, here or on another thread: "
                "call snapshot.apply() for each block"
            )
        self._rules_before = switched_off.current()
        self._thread = threading.get_ident()
        try:
            own = [(self._owner, settings) for settings in self._regions]
            if self._around is not None:
                own = [*((self._owner_around, settings) for settings in self._around()), *own]
            for owner, settings in own:
                self._entered.append(owner)  # first: a signal handler may raise as soon as it is entered
                enter(owner, settings)
            if self._off_by_rule is not None:
                switched_off.set_devices(self._off_by_rule)
        except BaseException:
            self._leave_all()
            raise

    @disable_dynamo
    def __exit__(self, *_: object) -> None:
        self._require_entered()
        self._leave_all()

    def _recreate_cm(self) -> Self:  # of ContextDecorator, for each call
        return type(self)(*self._regions, around=self._around, off_by_rule=self._off_by_rule)

    def _require_entered(self) -> None:
        if self._thread != threading.get_ident():
            raise state.not_entered(self)

    def _end_use(self) -> None:
        if self._thread is not None:
            self._thread = None
            self._is_in_use.release()

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function in the regions. Unlike a block, leave them even if a signal handler raises as it ends."""
        try:
            with self:
                return function(*args, **kwargs)
        finally:
            if self._entered:
                self._leave_all()

    def _leave_all(self) -> None:
        try:
            switched_off.leave(self._rules_before)
            while self._entered:
                leave(self._entered[-1])
                self._entered.pop()
        except BaseException:  # from a signal handler
            switched_off.leave(self._rules_before)
            while self._entered:
                state.machine.leave(self._entered.pop())
            raise
        finally:
            self._end_use()


class Suspendable(Regions):
    """Regions that are entered for each step of a generator, and left after it.

    Leaving also suspends the regions entered since, such as a ``with`` block that the generator's body is in. The next
    step enters them again, with the state that they had reached, on whatever thread it runs.
    """

    _suspended: Sequence[tuple[object, Settings]] = ()

    @disable_dynamo
    def __enter__(self) -> None:
        super().__enter__()
        try:
            for owner, settings in self._suspended:
                enter(owner, settings)
        except BaseException:
            self.__exit__()
            raise

    @disable_dynamo
    def __exit__(self, *_: object) -> None:
        self._require_entered()
        reached: list[tuple[object, Settings]] = []
        is_alone = not self._entered  # the thread was in no region: those that it is in now are the body's
        try:
            switched_off.leave(self._rules_before)
            while (self._entered or is_alone) and (last := state.machine.last()) is not None:
                owner, settings = last
                now = settings._replace(
                    enabled=torch.is_autocast_enabled(settings.device_type),
                    dtype=torch.get_autocast_dtype(settings.device_type),
                    cache_enabled=torch.is_autocast_cache_enabled(),
                )
                leave(owner)
                if owner is self._owner or owner is self._owner_around:
                    self._entered.pop()
                if owner is not self._owner_around:
                    reached.insert(0, (owner, now))
        except BaseException:
            self._leave_all()
            raise
        own = len(self._regions)
        self._regions, self._suspended = [settings for _, settings in reached[:own]], reached[own:]
        self._end_use()


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
                item = await _steps(_first_step(body), active)
                while True:
                    try:
                        sent = yield item
                    except GeneratorExit:
                        await _steps(body.aclose(), active)
                        raise
                    except BaseException as error:  # the body sees what the caller throws
                        item = await _steps(body.athrow(error), active)
                    else:
                        item = await _steps(body.asend(sent), active)
            except StopAsyncIteration:
                return

        wrapper: Any = async_steps
    elif inspect.iscoroutinefunction(kind):

        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await _steps(func(*args, **kwargs), suspendable())

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


@types.coroutine
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
