"""Decorated functions, generators and coroutines: the region is active while the body runs, and only then."""

import asyncio
import functools
import inspect
import types

import pytest
import torch

import polycast

pytestmark = pytest.mark.usefixtures("engine")


def enabled():
    return polycast.is_autocast_enabled("cpu")


@pytest.fixture(params=["instance", "autocast_decorator", "snapshot"])
def decorate(request):
    region = polycast.autocast("cpu")
    with region:
        snapshot = polycast.capture()
    yield {
        "instance": region,
        "autocast_decorator": functools.partial(polycast.autocast_decorator, region),
        "snapshot": snapshot.wrap,
    }[request.param]
    assert not enabled()


def test_a_function_runs_in_the_region_and_keeps_its_name(decorate):
    @decorate
    def work(depth):
        """A docstring."""
        return [enabled(), *(work(depth - 1) if depth else [])]

    assert work(3) == [True] * 4
    assert not enabled()
    assert (work.__name__, work.__doc__) == ("work", "A docstring.")


def test_a_method_and_a_callable_object_run_in_the_region(decorate):
    class Model:
        @decorate
        def forward(self):
            return enabled()

        def __call__(self):
            return enabled()

    assert Model().forward()
    assert decorate(Model())()


def test_a_generator_is_in_the_region_only_while_its_body_runs(decorate):
    seen = []

    @decorate
    def body():
        seen.append(enabled())
        got = yield 1
        seen.append((got, enabled()))
        try:
            yield 2
        except ValueError:
            seen.append(("thrown", enabled()))
        try:
            yield 3
        finally:
            seen.append(("closed", enabled()))

    steps = body()
    assert inspect.isgeneratorfunction(body)
    assert next(steps) == 1
    assert not enabled()
    assert steps.send("sent") == 2
    assert not enabled()
    assert steps.throw(ValueError()) == 3
    assert not enabled()
    steps.close()
    assert seen == [True, ("sent", True), ("thrown", True), ("closed", True)]


def test_a_generators_return_value_and_exception_come_through(decorate):
    @decorate
    def body(fail):
        yield
        if fail:
            raise KeyError("mine")
        return "value"

    def outer(fail):
        returned.append((yield from body(fail)))

    returned = []
    list(outer(False))
    assert returned == ["value"]
    with pytest.raises(KeyError, match="mine"):
        list(outer(True))


def test_a_block_that_a_generator_is_suspended_in_is_put_aside_with_it(decorate, in_thread):
    @decorate
    def body():
        with polycast.autocast("cpu", dtype=torch.float16):
            yield
            polycast.set_autocast_enabled("cpu", False)
            yield polycast.get_autocast_dtype("cpu"), polycast.autocast_nesting("cpu")
            yield polycast.get_autocast_dtype("cpu"), polycast.autocast_nesting("cpu"), enabled()
        yield polycast.get_autocast_dtype("cpu"), enabled()

    steps = body()
    next(steps)
    assert (enabled(), polycast.autocast_nesting("cpu")) == (False, 0)
    with polycast.autocast("cpu", enabled=False):
        assert next(steps) == (torch.float16, 3)
        assert in_thread(lambda: next(steps)) == (torch.float16, 2, False)
        assert polycast.autocast_nesting("cpu") == 1
    assert next(steps) == (torch.bfloat16, True)


def test_a_coroutine_is_in_the_region_only_while_its_body_runs(decorate):
    seen = []

    @decorate
    async def body():
        seen.append(("before", enabled()))
        await asyncio.sleep(0)
        seen.append(("after", enabled()))
        return "value"

    async def beside():
        seen.append(("beside", enabled()))

    async def main():
        task = asyncio.create_task(body())
        other = asyncio.create_task(beside())
        await other
        return await task

    assert inspect.iscoroutinefunction(body)
    assert asyncio.run(main()) == "value"
    assert seen == [("before", True), ("beside", False), ("after", True)]


def test_a_cancelled_coroutine_cleans_up_in_the_region(decorate):
    seen = []

    @decorate
    async def body():
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            seen.append(enabled())

    async def main():
        task = asyncio.create_task(body())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen == [True]


@types.coroutine
def awaited(first):
    sent = yield first, enabled()
    return sent, enabled()


class Awaited:
    @types.coroutine
    def method(self, first):
        return (yield from awaited(first))

    __call__ = method


AWAITED = {
    "function": awaited,
    "method": Awaited().method,
    "callable object": Awaited(),
    "partial": functools.partial(awaited),
    "partial of a method": functools.partial(Awaited().method),
}


@pytest.mark.parametrize("kind", AWAITED)
def test_a_generator_that_is_a_coroutine_can_be_awaited_and_is_in_the_region_while_its_body_runs(decorate, kind):
    body = decorate(AWAITED[kind])

    async def main():
        return await body("first")

    steps = main()
    assert steps.send(None) == ("first", True)
    assert not enabled()
    with pytest.raises(StopIteration) as stop:
        steps.send("sent")
    assert stop.value.value == ("sent", True)
    assert inspect.isawaitable(body("first"))


def test_a_plain_generator_cannot_be_awaited_and_leaves_nothing_when_it_is_dropped_half_way(decorate):
    @decorate
    def body():
        yield

    steps = body()
    assert not inspect.isawaitable(steps)
    next(steps)
    del steps
    assert not enabled()


def test_an_asynchronous_generator_is_in_the_region_only_while_its_body_runs(decorate):
    seen = []

    @decorate
    async def body():
        await asyncio.sleep(0)
        got = yield enabled()
        try:
            yield got, enabled()
        except ValueError:
            seen.append(("thrown", enabled()))
        try:
            yield "last"
        finally:
            await asyncio.sleep(0)
            seen.append(("closed", enabled()))

    async def main():
        steps = body()
        assert await steps.__anext__() is True
        assert not enabled()
        assert await steps.asend("sent") == ("sent", True)
        assert await steps.athrow(ValueError()) == "last"
        assert not enabled()
        await steps.aclose()
        return [item async for item in body()]

    assert inspect.isasyncgenfunction(body)
    assert asyncio.run(main())[0] is True
    assert seen[:2] == [("thrown", True), ("closed", True)]


def test_torchscript_says_that_it_cannot_compile_a_decorated_function(decorate):
    @decorate
    def work(x: torch.Tensor):
        return x

    assert getattr(work, "__script_unsupported") == "@autocast() decorator is not supported in script mode"


def test_an_event_loop_that_ends_closes_a_suspended_asynchronous_generator_once(decorate):
    seen, problems = [], []

    @decorate
    async def body():
        try:
            yield
        finally:
            await asyncio.sleep(0)
            seen.append(enabled())

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        steps = body()
        await steps.__anext__()
        main.steps = steps

    asyncio.run(main())
    assert (seen, problems) == ([True], [])
