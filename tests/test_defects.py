"""Defects of torch's autocast that polycast does not have: one body for both.

The run on torch is expected to fail, strictly: one that passes says that torch has mended the defect. Each runs in a
thread of its own, because torch's state belongs to the thread and some of the defects leave it on.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import polycast

pytestmark = pytest.mark.usefixtures("engine")

X = torch.ones(2, 2)


def defect(reason, raises=AssertionError):
    """Run a test on polycast, where it has to pass, and on torch.amp, where it has to fail in the way that is named."""

    def decorate(test):
        def alone(amp, in_thread):
            polycast.uninstall()  # torch is to run its own kernels
            in_thread(lambda: test(amp))

        alone.__name__, alone.__doc__ = test.__name__, test.__doc__
        failing = pytest.mark.xfail(strict=True, raises=raises, reason=f"torch: {reason}")
        both = [pytest.param(polycast, id="polycast"), pytest.param(torch.amp, id="torch", marks=failing)]
        return pytest.mark.parametrize("amp", both)(alone)

    return decorate


def casts(function):
    """Return how many tensors a function casts."""
    with torch.profiler.profile(acc_events=True) as profile:
        function()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")


@defect("autocast stays on after the last exit")
def test_one_region_nested_in_itself_is_left(amp):
    region = amp.autocast("cpu")
    with region, region:
        pass
    assert not torch.is_autocast_enabled("cpu")


@defect("autocast stays on after the last return")
def test_a_decorated_function_that_recurs_is_left(amp):
    @amp.autocast("cpu")
    def countdown(n):
        if n:
            countdown(n - 1)

    countdown(2)
    assert not torch.is_autocast_enabled("cpu")


@defect("the body runs after the region was left")
def test_the_body_of_a_decorated_generator_is_cast(amp):
    @amp.autocast("cpu")
    def products():
        yield (X @ X).dtype

    assert list(products()) == [torch.bfloat16]


@defect("the body runs after the region was left")
def test_the_body_of_a_decorated_coroutine_is_cast(amp):
    @amp.autocast("cpu")
    async def product():
        await asyncio.sleep(0)
        return (X @ X).dtype

    assert asyncio.run(product()) is torch.bfloat16


@defect("the generator restores what it found, which the region around it has restored already")
def test_a_generator_that_is_closed_after_the_region_around_it_leaves_autocast_off(amp):
    def batches():
        with amp.autocast("cpu"):
            yield

    with amp.autocast("cpu"):
        suspended = batches()
        next(suspended)
    suspended.close()
    assert not torch.is_autocast_enabled("cpu")


@defect("a weight's cast is kept under its address alone")
def test_an_in_place_update_inside_a_region_is_seen(amp):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with amp.autocast("cpu"), torch.no_grad():
        before = X @ weight
        weight.mul_(3)
        assert torch.equal(X @ weight, 3 * before)


@defect("one cache serves all threads, and every thread clears it")
def test_leaving_a_region_on_another_thread_keeps_this_threads_casts(amp):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    x = X.bfloat16()

    def elsewhere():
        with amp.autocast("cpu"):
            pass

    def twice():
        with amp.autocast("cpu"):
            x @ weight
            with ThreadPoolExecutor(1) as thread:
                thread.submit(elsewhere).result()
            x @ weight

    assert casts(twice) == 1


@defect("the bfloat16 cast is used where float16 is wanted", raises=RuntimeError)
def test_a_weight_that_was_cast_to_bfloat16_can_be_cast_to_float16(amp):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with amp.autocast("cpu", torch.bfloat16):
        X @ weight
        with amp.autocast("cpu", torch.float16):
            assert (X @ weight).dtype is torch.float16


@defect("only weights that require grad are kept")
def test_a_frozen_weight_is_cast_once_in_a_region(amp):
    frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    x = X.bfloat16()

    def twice():
        with amp.autocast("cpu"):
            x @ frozen
            x @ frozen

    assert casts(twice) == 1


@defect("float16 with bfloat16 is unexpected", raises=RuntimeError)
def test_float16_and_bfloat16_can_be_concatenated(amp):
    with amp.autocast("cpu"):
        assert torch.cat([X.half(), X.bfloat16()]).dtype is torch.float32


@defect("float16 with bfloat16 is unexpected", raises=RuntimeError)
def test_float16_and_bfloat16_can_be_stacked(amp):
    with amp.autocast("cpu"):
        assert torch.stack([X.half(), X.bfloat16()]).dtype is torch.float32


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@defect("the norms of nested tensors are not autocast", raises=RuntimeError)
def test_an_encoder_computes_padded_sequences(amp):
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    with amp.autocast("cpu"), torch.no_grad():
        result = encoder(torch.ones(1, 3, 8), src_key_padding_mask=torch.tensor([[False, False, True]]))
    assert result.dtype is torch.bfloat16


@defect("forward has no ctx to record its state in", raises=AttributeError)
def test_custom_fwd_works_with_setup_context(amp):
    class Square(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(device_type="cpu")
        def forward(x):
            return x * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        @amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    x = torch.full((2, 2), 3.0, requires_grad=True)
    Square.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 2), 6.0))


@pytest.mark.skipif(torch.xpu.is_available(), reason="there is an XPU here")
@defect("it says whether there is a dispatch key, not whether there is a device")
def test_autocast_is_not_available_for_a_device_that_is_absent(amp):
    assert amp.is_autocast_available("xpu") is False
