"""Snapshots carry a thread's regions to another thread."""

import asyncio

import pytest
import torch

import polycast

pytestmark = pytest.mark.usefixtures("engine")


def observe():
    return {
        name: (polycast.is_autocast_enabled(name), torch.get_autocast_dtype(name), polycast.autocast_nesting(name))
        for name in ("cpu", "hpu")
    } | {"cache": polycast.is_autocast_cache_enabled()}


def test_another_thread_gets_device_dtype_policy_and_cache_setting(hand_made, in_thread):
    hand_made("hpu")
    x = torch.ones(2, 2)
    with (
        polycast.autocast("cpu", torch.float16, cache_enabled=False, policy={"aten::mm": polycast.CastPolicy.FP32}),
        polycast.autocast("hpu", torch.bfloat16),
    ):
        snapshot = polycast.capture()

    def work():
        before = observe()
        with snapshot.apply():
            inside = observe()
            dtypes = torch.mm(x, x).dtype, torch.bmm(x[None], x[None]).dtype
        assert observe() == before
        return inside, dtypes

    inside, dtypes = in_thread(work)
    assert inside == {"cpu": (True, torch.float16, 1), "hpu": (True, torch.bfloat16, 1), "cache": False}
    assert dtypes == (torch.float32, torch.float16)


@pytest.mark.parametrize(("device_type", "dtype"), [("cpu", torch.float16), ("ipu", torch.bfloat16)])
def test_what_torch_enabled_is_captured_too_also_without_a_backend(in_thread, device_type, dtype):
    with torch.autocast(device_type, dtype):
        snapshot = polycast.capture()
    found = in_thread(
        snapshot.wrap(lambda: (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)))
    )
    assert found == (True, dtype)


@pytest.fixture
def snapshot():
    with polycast.autocast("cpu"):
        return polycast.capture()


def test_one_snapshot_is_applied_within_itself_and_after_an_exception(snapshot):
    with snapshot.apply(), snapshot.apply():
        assert polycast.autocast_nesting("cpu") == 2
    with pytest.raises(ZeroDivisionError), snapshot.apply():
        raise ZeroDivisionError
    assert polycast.autocast_nesting("cpu") == 0


def test_the_regions_of_a_snapshot_are_in_one_block_at_a_time(snapshot, in_thread):
    refusal = r"entered already, .*: call snapshot\.apply\(\) for each block$"
    for of in (snapshot, polycast.Snapshot(())):
        regions = of.apply()
        with regions:
            before = observe()
            for elsewhere in (in_thread, lambda enter: enter()):
                with pytest.raises(RuntimeError, match=refusal):
                    elsewhere(regions.__enter__)
            with pytest.raises(RuntimeError, match="cannot be left on thread .*, which has not entered it"):
                in_thread(regions.__exit__)
            assert observe() == before
        with pytest.raises(RuntimeError, match="cannot be left on thread 'MainThread', which has not entered it"):
            regions.__exit__()
        with regions:  # again
            assert observe() == before
        assert polycast.autocast_nesting("cpu") == 0


def test_regions_that_cannot_be_entered_can_be_once_they_can(monkeypatch):
    with polycast.autocast("cpu"):
        regions = polycast.Snapshot(()).apply()
        with monkeypatch.context() as patch:
            patch.setattr("polycast.region.capture.snapshot", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                regions.__enter__()
        with regions:
            assert not polycast.is_autocast_enabled("cpu")


def test_what_applies_a_snapshot_decorates_functions(snapshot):

    @snapshot.apply()
    def factorial(n):
        assert polycast.autocast_nesting("cpu") == 4 - n
        return n * factorial(n - 1) if n else 1

    assert factorial(3) == factorial(3) == 6
    assert polycast.autocast_nesting("cpu") == 0


def test_the_policy_is_that_of_the_snapshot_and_not_of_the_place():
    x = torch.ones(2, 2)
    plain, fp32 = polycast.autocast("cpu"), polycast.autocast("cpu", policy={"aten::mm": polycast.CastPolicy.FP32})
    with plain:
        of_plain = polycast.capture()
    with fp32:
        of_fp32 = polycast.capture()
    polycast.uninstall()
    with fp32, of_plain.apply():
        assert torch.mm(x, x).dtype is torch.bfloat16
    polycast.uninstall()
    with of_fp32.apply():
        assert torch.mm(x, x).dtype is torch.float32


def test_a_snapshot_without_cache_keeps_its_casts_out_of_the_cache_of_the_place(snapshot):
    weight, x, cache = torch.nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2), polycast.WeightCache()
    with polycast.autocast("cpu", cache=cache), snapshot.apply():
        torch.mm(x, weight)
    assert cache.stats().entries == 0


def test_a_wrapped_generator_has_the_policy_of_the_snapshot_and_its_kernels_in_each_step():
    x = torch.ones(2, 2)
    with polycast.autocast("cpu", policy={"aten::add.Tensor": polycast.CastPolicy.FP32}):
        snapshot = polycast.capture()

    @snapshot.wrap
    def steps():
        while True:
            yield torch.mm(x, x).dtype, (x.bfloat16() + x.bfloat16()).dtype

    running = steps()
    for _ in range(2):
        with polycast.autocast("cpu", policy={"aten::mm": polycast.CastPolicy.FP32}):
            assert next(running) == (torch.bfloat16, torch.float32)
        polycast.uninstall()


def test_what_cannot_be_called_cannot_be_wrapped():
    text = r"^wrap\(func\) requires a callable, but got Tensor: pass the function, do not call it$"
    with pytest.raises(TypeError, match=text):
        polycast.capture().wrap(torch.ones(2))


def test_steps_of_a_generator_are_outside_of_regions_that_were_entered_since(hand_made):
    """Also in a block of the body, which is left between the steps."""
    hand_made("hpu")

    def enabled():
        return polycast.is_autocast_enabled("cpu"), polycast.is_autocast_enabled("hpu")

    @polycast.capture().wrap
    def steps():
        yield enabled()
        with polycast.autocast("hpu", torch.bfloat16):
            yield enabled()
            yield enabled()
        yield enabled()

    running = steps()
    assert next(running) == (False, False)
    with polycast.autocast("cpu"):
        assert next(running) == (False, True)
        assert enabled() == (True, False)
    assert enabled() == (False, False)
    assert next(running) == (False, True)
    assert polycast.autocast_nesting("hpu") == 0
    with polycast.autocast("hpu", torch.bfloat16):
        assert next(running) == (False, False)
        assert enabled() == (False, True)


def test_a_rule_applies_again_after_a_region_that_a_generator_is_suspended_in(under):
    inner = under(lambda x: (x @ x).dtype, "float16")

    @under
    def outer(x):
        def steps():
            with polycast.autocast("cpu", enabled=False):
                yield inner(x)
                yield inner(x)
            yield inner(x)

        return list(polycast.capture().wrap(steps)())

    with polycast.autocast("cpu"):
        assert outer(torch.ones(2, 2)) == [torch.float32, torch.float32, torch.float16]


def test_a_region_that_outlives_the_block_of_a_snapshot_stays_open():
    region = polycast.autocast("cpu")
    with polycast.capture().apply():
        region.__enter__()
    assert polycast.is_autocast_enabled("cpu")
    region.__exit__(None, None, None)
    assert not polycast.is_autocast_enabled("cpu")


def test_tasks_that_share_a_thread_leave_their_own_regions():
    async def apply():
        with polycast.capture().apply():
            await asyncio.sleep(0)

    async def enter():
        with polycast.autocast("cpu"):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return polycast.is_autocast_enabled("cpu")

    async def main():
        return await asyncio.gather(apply(), enter())

    assert asyncio.run(main()) == [None, True]
