"""The regions of a recomputation, whatever happens between a forward and its backward, and around them."""

import gc
import itertools
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import polycast
from polycast import CastPolicy
from polycast.engine import state

from .conftest import FP32, in_policy, modes

pytestmark = pytest.mark.usefixtures("engine")
PASSTHROUGH = {"aten::linear": CastPolicy.PASSTHROUGH}


def innermost(device_type="cpu"):
    """Return the policies and the cache of this thread's innermost region, if it is in one."""
    override, cache = state.machine.innermost(device_type)
    return (override and override.policies, cache) if state.machine.nesting(device_type) else None


def autocast_state(device_type="cpu"):
    return (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
        innermost(device_type),
    )


def recomputed(note, region, reentrant):
    """Return what `note` returns in a forward in a region, and in its recomputation."""
    seen, x = [], torch.ones(1, requires_grad=True)

    def body(x):
        seen.append(note())
        return x.exp()

    with region:
        y = checkpoint(body, x, use_reentrant=reentrant)
    y.sum().backward()
    return seen


@modes
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("cache_enabled", [None, False])
def test_the_recomputation_has_all_settings_of_the_region(reentrant, enabled, cache_enabled):
    region = polycast.autocast("cpu", torch.float16, enabled, cache_enabled, policy=FP32)
    seen = recomputed(autocast_state, region, reentrant)
    assert seen == 2 * [(enabled, torch.float16, cache_enabled is None, (FP32, None))]
    assert autocast_state() == (False, torch.bfloat16, True, None)


@modes
def test_a_device_that_no_input_is_on_has_its_region_again(hand_made, reentrant):
    """torch takes along the state of the first input's device, and of the CPU."""
    hand_made("xpu")
    seen = recomputed(lambda: autocast_state("xpu"), polycast.autocast("xpu", policy=FP32), reentrant)
    assert seen == 2 * [(True, torch.float16, True, (FP32, None))]


@modes
@pytest.mark.parametrize("carried", [False, True], ids=["before there were policies", "after there were policies"])
@pytest.mark.parametrize("forward", [None, FP32, PASSTHROUGH], ids=["no policy", "FP32", "PASSTHROUGH"])
@pytest.mark.parametrize("backward", [None, FP32, PASSTHROUGH], ids=["no policy", "FP32", "PASSTHROUGH"])
def test_a_backward_in_another_region_recomputes_in_that_of_the_forward(block, reentrant, carried, forward, backward):
    if carried:
        with in_policy():
            pass

    def gradients(run):
        block.zero_grad()
        block.seen.clear()
        x = torch.linspace(-1, 1, 24).reshape(3, 8).requires_grad_()
        with polycast.autocast("cpu", policy=forward):
            loss = run(x).float().pow(2).sum()
        with polycast.autocast("cpu", torch.float16, policy=backward, cache=cache):
            loss.backward()
            assert autocast_state()[3] == (backward, cache)
        return [x.grad, *(parameter.grad for parameter in block.parameters())]

    cache = polycast.WeightCache()
    actual = gradients(lambda x: checkpoint(block, x, use_reentrant=reentrant))
    assert block.seen == 2 * [torch.float32 if forward else torch.bfloat16]
    torch.testing.assert_close(actual, gradients(block), rtol=0, atol=0)


# torch's warning is of reentrant checkpoints that the forward of another runs without gradients
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("seed", range(20))
def test_any_nesting_of_regions_and_checkpoints_gives_the_gradients_that_it_gives_without_checkpoints(blocks, seed):
    choose = random.Random(seed)

    def nest(depth):
        """Return a function that runs layers in regions and, if asked to, checkpoints."""
        kind = choose.choice(["layer", "layer", "region", "checkpoint", "checkpoint", "both"]) if depth else "layer"
        if kind == "layer":
            number = next(numbers)
            return lambda x, checkpoints: blocks(x.float(), number)
        if kind == "both":
            first, second = nest(depth - 1), nest(depth - 1)
            return lambda x, checkpoints: second(first(x, checkpoints), checkpoints)
        inside = nest(depth - 1)
        if kind == "region":
            region = polycast.autocast("cpu", choose.choice(dtypes), policy=choose.choice([None, FP32, PASSTHROUGH]))
            return lambda x, checkpoints: region(inside)(x, checkpoints)
        reentrant = choose.random() < 0.5

        def maybe_checkpointed(x, checkpoints):
            return (
                checkpoint(inside, x, checkpoints, use_reentrant=reentrant) if checkpoints else inside(x, checkpoints)
            )

        return maybe_checkpointed

    numbers, dtypes = itertools.count(), [torch.bfloat16, torch.float16]
    parts = [nest(5) for _ in range(2)]

    def run(x, checkpoints):
        for part in parts:
            x = part(x, checkpoints)
        return x

    blocks.assert_same_gradients(
        lambda x: run(x, True),
        lambda x: run(x, False),
        lambda: polycast.autocast("cpu", policy={"aten::relu": CastPolicy.LOWER_PRECISION_FP}),
    )


@modes
@pytest.mark.parametrize("elsewhere", ["forward", "backward"])
def test_a_forward_and_its_backward_may_be_on_two_threads(block, in_thread, reentrant, elsewhere):
    x = torch.ones(1, 8, requires_grad=True)

    def forward():
        with in_policy():
            return checkpoint(block, x, use_reentrant=reentrant).sum()

    loss = in_thread(forward) if elsewhere == "forward" else forward()
    in_thread(loss.backward) if elsewhere == "backward" else loss.backward()
    assert block.seen == [torch.float32, torch.float32]


@modes
def test_threads_with_policies_of_their_own_recompute_each_with_its_own(reentrant):
    barrier = threading.Barrier(2)

    def note():
        barrier.wait()
        return innermost()[0]

    def work(policy):
        return [
            policies
            for _ in range(20)
            for policies in recomputed(note, polycast.autocast("cpu", policy=policy), reentrant)
        ]

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(work, [FP32, PASSTHROUGH])] == [40 * [FP32], 40 * [PASSTHROUGH]]


@modes
def test_a_region_that_is_suspended_around_a_checkpoint_is_that_of_its_recomputation(block, reentrant):
    @in_policy()
    def steps(x):
        yield
        yield checkpoint(block, x, use_reentrant=reentrant)

    started, x = [], torch.ones(1, 8, requires_grad=True)
    for _ in range(2):
        started.append(steps(x))
        next(started[-1])
    with polycast.autocast("cpu"):
        losses = [next(generator).float().sum() for generator in started]
        plain = checkpoint(block, x, use_reentrant=reentrant).float().sum()
    for loss in (plain, *losses):
        loss.backward()
    bfloat16, float32 = torch.bfloat16, torch.float32
    assert block.seen == [float32, float32, bfloat16, bfloat16, float32, float32]


@modes
def test_a_recomputation_that_raises_leaves_its_regions(reentrant):
    def body(x):
        if state.machine.nesting("cpu") and runs:
            raise KeyError("in the recomputation")
        runs.append(None)
        return x.exp()

    runs, x = [], torch.ones(1, requires_grad=True)
    with in_policy():
        y = checkpoint(body, x, use_reentrant=reentrant)
    with pytest.raises(KeyError, match="in the recomputation"):
        y.sum().backward()
    assert autocast_state()[3] is None


def test_a_retained_graph_is_recomputed_in_each_backward(block):
    x = torch.ones(1, 8, requires_grad=True)
    with in_policy():
        y = checkpoint(block, x, use_reentrant=False).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert block.seen == 3 * [torch.float32]


def test_a_gradient_of_a_gradient_is_recomputed_in_the_region_of_the_forward(blocks):
    def second_order(run):
        blocks.seen.clear()
        x = torch.linspace(-1, 1, 24).reshape(3, 8).requires_grad_()
        with in_policy():
            loss = run(x).pow(3).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), x)

    expected = second_order(blocks)
    found = second_order(lambda x: checkpoint(blocks, x, use_reentrant=False))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert set(blocks.seen) == {torch.float32}


def test_a_backward_that_is_no_recomputation_has_the_policies_of_where_it_runs():
    """As it has torch's autocast state of there; custom_bwd gives it those of the forward."""
    seen = []

    class Double(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x * 2)

        @staticmethod
        def backward(ctx, gradient):
            with torch.autocast("cpu", torch.bfloat16):
                seen.append(innermost())
            return gradient * 2

    x = torch.ones(1, requires_grad=True)
    with in_policy():
        y = Double.apply(x)
    y.backward(retain_graph=True)
    with polycast.autocast("cpu", policy=PASSTHROUGH):
        y.backward()
    assert seen == [None, (PASSTHROUGH, None)]


@modes
def test_what_a_recomputation_needs_lives_as_long_as_the_graph(reentrant):
    def step():
        cache = polycast.WeightCache()
        x = torch.ones(1, requires_grad=True)
        with polycast.autocast("cpu", cache=cache, policy=FP32):
            return weakref.ref(cache), checkpoint(torch.exp, x, use_reentrant=reentrant)

    gc.disable()
    try:
        cache, y = step()
        assert cache() is not None
        y.backward()
        del y
        assert cache() is None
    finally:
        gc.enable()


@pytest.mark.slow
@modes
def test_thousands_of_steps_leave_nothing_behind(reentrant):
    def steps(count):
        for _ in range(count):
            x = torch.ones(1, requires_grad=True)
            with polycast.autocast("cpu", policy={"aten::exp": CastPolicy.PASSTHROUGH}):
                y = checkpoint(torch.exp, x, use_reentrant=reentrant)
            y.backward()
        del x, y
        gc.collect()
        return len(gc.get_objects())

    before = steps(100)
    assert steps(2000) - before < 100
