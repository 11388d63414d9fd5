"""Actions: calls by a recipe that the native engine computes without Python."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from polycast import Int8, WeightCache, autocast
from polycast.engine import state

from .int8_linears import X, expected, run

pytestmark = pytest.mark.usefixtures("native", "no_grad", "kernel")


def test_python_is_asked_once(layer, kernel, asked):
    for _ in range(4):
        assert torch.equal(run(layer, X), expected(layer))
    assert asked == ["linear"]
    assert (kernel.prepared, kernel.ran) == (1, 4)


@pytest.mark.usefixtures("int8_operators")
def test_each_op_is_asked_for(asked):
    weight = nn.Parameter(torch.randn(8, 8))
    for _ in range(3):
        for op in (torch.mm, torch.matmul, linear):
            run(op, X, weight)
    assert sorted(asked) == ["linear", "matmul", "mm"]


def test_weights_of_the_same_sizes_share_an_action_once_they_are_prepacked(layer, kernel, asked):
    other = nn.Linear(8, 8)
    for _ in range(3):
        for each in (layer, other):
            assert torch.equal(run(each, X), expected(each))
    assert asked == ["linear", "linear"]
    assert (kernel.prepared, kernel.ran) == (2, 6)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, x: (layer, x[:2]),
        lambda layer, x: (layer, x[0]),
        lambda layer, x: (layer, x.t().contiguous().t()),
        lambda layer, x: (layer, x.bfloat16()),
        lambda layer, x: (layer, x[:0]),
        lambda layer, x: (nn.Linear(8, 4), x),
        lambda layer, x: (nn.Linear(8, 8, bias=False), x),
        lambda layer, x: (nn.Linear(8, 8).bfloat16(), x),
    ],
    ids=["fewer rows", "a vector", "strides", "dtype", "no rows", "another weight", "no bias", "weight's dtype"],
)
def test_other_metadata_are_asked_for(layer, asked, change):
    run(layer, X)
    for _ in range(2):
        changed, x = change(layer, X)
        result = run(changed, x)
        assert (result.dtype, result.shape) == (torch.bfloat16, (*x.shape[:-1], changed.out_features))
    assert len(asked) >= 2
    count = len(asked)
    run(changed, x)
    run(layer, X)
    assert len(asked) == count


def test_the_fast_dtype_is_part_of_the_metadata(layer, asked):
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16, torch.float16):
        assert run(layer, X, dtype=dtype).dtype is dtype
    assert asked == ["linear"] * 2


def test_a_weight_of_another_size_than_the_recipe_is_for_falls_back_without_python(layer, kernel, asked):
    recipe = Int8(min_size=65)
    with autocast("cpu"):
        fast = layer(X)
    for _ in range(3):
        assert torch.equal(run(layer, X, recipe=recipe), fast)
        assert torch.equal(run(layer, X), expected(layer))
    assert asked == ["linear"] * 2
    assert kernel.ran == 3


@pytest.mark.parametrize("bias", [torch.ones(1), torch.ones(3, 8)], ids=["broadcast", "of rows"])
def test_a_bias_of_another_shape_is_asked_for(layer, kernel, asked, bias):
    for _ in range(2):
        run(linear, X, layer.weight, layer.bias)
        run(linear, X, layer.weight, bias)
    assert asked == ["linear"] * 2


class OddInput(Exception):
    """Raised for a call that the kernel does not support."""


def test_an_error_of_the_operator_is_raised(layer, asked, int8_operators, monkeypatch):
    run(layer, X)

    def fail(*args):
        raise OddInput

    library = torch.library.Library("polycast_test_int8", "IMPL")
    library.impl("linear", fail, "CPU", allow_override=True)
    for _ in range(2):
        with pytest.raises(OddInput):
            run(layer, X)
    library._destroy()
    assert asked == ["linear"]
    assert torch.equal(run(layer, X), expected(layer))


def test_training_falls_back_without_python(layer, kernel, asked):
    for _ in range(3):
        with torch.enable_grad():
            run(layer, X).sum().backward()
        assert layer.weight.grad.shape == (8, 8)
        assert torch.equal(run(layer, X), expected(layer))
    assert asked == ["linear"] * 2
    assert kernel.ran == 3


# ---- Weights.


def test_a_weight_and_a_tensor_of_its_metadata_are_told_apart(layer, kernel, asked):
    plain = layer.weight.detach().clone()
    with autocast("cpu"):
        fast = linear(X, plain)
    for _ in range(2):
        run(linear, X, layer.weight)
        assert torch.equal(run(linear, X, plain), fast)
    assert kernel.ran == 2


def test_a_weight_at_the_address_of_a_dead_one_is_prepacked(kernel, asked):
    for _ in range(20):
        layer = nn.Linear(8, 8)
        assert torch.equal(run(layer, X), expected(layer))
        assert torch.equal(run(layer, X), expected(layer))
        del layer
        gc.collect()
    assert kernel.prepared == 20


def test_each_cache_has_its_own_prepacked_weights(layer, kernel, asked):
    caches = WeightCache(), WeightCache()
    for _ in range(3):
        for cache in caches:
            run(layer, X, cache=cache)
        run(layer, X)
    assert kernel.prepared == 3
    assert [cache.stats().packings for cache in caches] == [1, 1]
    assert [cache.stats().hits for cache in caches] == [2, 2]
    assert len(asked) == 3


def test_a_weight_that_was_evicted_is_asked_for(kernel, asked):
    cache = WeightCache(max_bytes=64 + 32)
    layers = nn.Linear(8, 8), nn.Linear(8, 8)
    for _ in range(40):
        for layer in layers:
            run(layer, X, cache=cache)
    assert 40 < len(asked) < 80
    assert cache.stats().packings == 1


# ---- What makes the engine forget.


def test_forgetting_asks_again(layer, asked):
    run(layer, X)
    state.machine.forget_actions()
    run(layer, X)
    run(layer, X)
    assert len(asked) == 2


def test_many_shapes_are_computed_and_forgotten(layer, asked):
    for rows in range(1, 2100):
        run(layer, X[:1].expand(rows, 8))
    count = len(asked)
    assert count == 2099
    run(layer, X[:1].expand(2099, 8))
    assert len(asked) == count
    run(layer, X[:1])
    assert len(asked) == count + 1


def test_threads_decide_for_themselves(layer, asked):
    run(layer, X)

    def work(_):
        with torch.no_grad():
            return [torch.equal(run(layer, X), expected(layer)) for _ in range(50)]

    with ThreadPoolExecutor(2) as threads:
        assert all(all(equal) for equal in threads.map(work, range(4)))
    assert len(asked) <= 3


def test_a_thread_that_writes_is_seen_by_another(layer, in_thread):
    run(layer, X)

    def write():
        with torch.no_grad():
            layer.weight.mul_(2)

    in_thread(write)
    assert torch.equal(run(layer, X), expected(layer))


def test_constants_of_other_types_are_refused(layer, kernel):
    kernel.constants = ([1],)
    with pytest.raises(TypeError, match=r"constants must be numbers, strings, dtypes or None, got \[1\]"):
        run(layer, X, recipe=Int8(min_size=2))
