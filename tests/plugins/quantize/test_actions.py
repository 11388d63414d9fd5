"""Actions: calls by a recipe that the native engine computes without Python."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from polycast import Int8, WeightCache
from polycast.engine import state
from polycast.engine.recipes.actions import Action, ActionKind
from polycast_plugins.quantize.kernel_plan import KernelPlan

from .int8_linears import X, expected, run

pytestmark = pytest.mark.usefixtures("native", "no_grad", "kernel")


def test_python_is_asked_once(layer, kernel, asked):
    for _ in range(4):
        assert torch.equal(run(layer, X), expected(layer))
    assert asked == ["linear"]
    assert (kernel.prepared, kernel.ran) == (1, 4)


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


CHANGES = {
    "fewer rows": lambda layer, x: (layer, x[:2]),
    "a vector": lambda layer, x: (layer, x[0]),
    "strides": lambda layer, x: (layer, x.t().contiguous().t()),
    "dtype": lambda layer, x: (layer, x.bfloat16()),
    "no rows": lambda layer, x: (layer, x[:0]),
    "another weight": lambda layer, x: (nn.Linear(8, 4), x),
    "no bias": lambda layer, x: (nn.Linear(8, 8, bias=False), x),
    "weight's dtype": lambda layer, x: (nn.Linear(8, 8).bfloat16(), x),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
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
    fast = run(layer, recipe=None)
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


def test_an_error_of_the_operator_is_raised(layer, asked, int8_operators, monkeypatch):
    run(layer, X)

    def fail(*args):
        raise ZeroDivisionError

    library = torch.library.Library("polycast_test_int8", "IMPL")
    library.impl("linear", fail, "CPU", allow_override=True)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
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
    fast = run(linear, X, plain, recipe=None)
    for _ in range(2):
        run(linear, X, layer.weight)
        assert torch.equal(run(linear, X, plain), fast)
    assert kernel.ran == 2


def test_a_weight_at_the_address_of_a_dead_one_is_prepacked(kernel):
    for _ in range(20):
        layer = nn.Linear(8, 8)
        for _ in range(2):
            assert torch.equal(run(layer, X), expected(layer))
        del layer
        gc.collect()
    assert kernel.prepared == 20


def test_each_cache_has_its_own_prepacked_weights(layer, kernel, asked):
    caches = WeightCache(), WeightCache()
    for _ in range(3):
        for settings in ({"cache": caches[0]}, {"cache": caches[1]}, {}):
            run(layer, X, **settings)
    assert [(cache.stats().packings, cache.stats().hits) for cache in caches] == [(1, 2), (1, 2)]
    assert (kernel.prepared, len(asked)) == (3, 3)


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
    for _ in range(2):
        run(layer, X)
    assert len(asked) == 2


def test_many_shapes_are_computed_and_forgotten(layer, asked):
    for rows in range(1, 2100):
        run(layer, X[:1].expand(rows, 8))
    for rows, count in ((2099, 2099), (1, 2100)):
        run(layer, X[:1].expand(rows, 8))
        assert len(asked) == count


def test_threads_decide_for_themselves(layer, asked):
    run(layer, X)

    def work(_):
        with torch.no_grad():
            return [torch.equal(run(layer, X), expected(layer)) for _ in range(50)]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, range(4))) == [[True] * 50] * 4
    assert len(asked) <= 3


def test_a_thread_that_writes_is_seen_by_another(layer, in_thread):
    run(layer, X)
    in_thread(torch.no_grad()(lambda: layer.weight.mul_(2)))
    assert torch.equal(run(layer, X), expected(layer))


def test_constants_of_other_types_are_refused(layer, kernel):
    kernel.constants = ([1],)
    with pytest.raises(TypeError, match=r"constants must be numbers, strings, dtypes or None, got \[1\]"):
        run(layer, X, recipe=Int8(min_size=2))


# ---- In float32, or with the cached cast of the weight.


@pytest.fixture
def decide(kernel, monkeypatch):
    """Return a function that makes calls be computed by an action, and the results by Python NaN."""

    def decide(action):
        def compute(plan, op, args, cache, checked=False):
            return torch.full((3, 8), torch.nan, dtype=torch.bfloat16), action

        monkeypatch.setattr(KernelPlan, "_compute", compute)

    return decide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_float32_casts_the_inputs_up_and_the_result_down(decide, asked, bias, dtype):
    decide(KernelPlan.FLOAT32)
    layer, x = nn.Linear(8, 8, bias=bias), X.to(dtype)
    run(layer, x)
    for _ in range(2):
        assert torch.equal(run(layer, x), layer(x.float()).bfloat16())
    assert asked == ["linear"]


def test_float32_is_recorded_by_autograd(layer, decide, asked):
    decide(KernelPlan.FLOAT32)
    with torch.enable_grad():
        run(layer, X)  # Python's
        for _ in range(2):
            result = run(layer, X)
            assert torch.equal(result, torch.nn.functional.linear(X, layer.weight, layer.bias).bfloat16())
            (of_weight,) = torch.autograd.grad(result.sum(), layer.weight)
            assert torch.equal(of_weight, torch.ones(8, len(X)) @ X)
    assert asked == ["linear"]


@pytest.fixture
def linear_of_cast(kernel):
    """Return an action that multiplies by the weight's cached cast, and the list of the casts that it got."""
    casts = []
    library = torch.library.Library("polycast_test_cast", "FRAGMENT")
    library.define(
        "linear(Tensor x, Tensor weight, Tensor? bias, Tensor cast, ScalarType dtype, float factor) -> Tensor"
    )

    def call(x, weight, bias, cast, dtype, factor):
        casts.append(cast)
        return factor * linear(x.to(dtype), cast, bias.to(dtype)).float()  # cast to the fast dtype by the engine

    library.impl("linear", call, "CPU")
    yield Action(ActionKind.OPERATOR, 1, 0, torch.ops.polycast_test_cast.linear.default, (2,)), casts
    library._destroy()


def test_an_operator_gets_the_cached_cast(layer, decide, linear_of_cast, asked, cached):
    action, casts = linear_of_cast
    decide(action)
    first, second = run(lambda: (layer(X), layer(X)), **cached)
    assert first.isnan().all()
    assert torch.equal(second, 2 * linear(X.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()))
    run(lambda: (layer(X), layer(X)), **cached)
    assert {cast.dtype for cast in casts} == {torch.bfloat16}
    assert casts[1].data_ptr() == casts[2].data_ptr()
    layer.weight.mul_(2)
    run(layer, X, **cached)
    assert torch.equal(casts[-1], layer.weight.bfloat16())
    assert asked == ["linear"]


def test_an_operator_gets_a_weight_in_the_fast_dtype_as_it_is(decide, linear_of_cast, asked):
    action, casts = linear_of_cast
    decide(action)
    layer = nn.Linear(8, 8).bfloat16()
    for _ in range(3):
        run(layer, X)
    assert len(asked) == 1
    assert {cast.data_ptr() for cast in casts} == {layer.weight.data_ptr()}


def test_an_operator_gets_a_new_cast_of_a_tensor_that_is_no_weight(layer, decide, linear_of_cast, asked):
    action, casts = linear_of_cast
    decide(action)
    given = [torch.randn(8, 8) for _ in range(3)]
    for weight in given:
        run(linear, X, weight, layer.bias)
    assert asked == ["linear"]
    assert all(torch.equal(cast, weight.bfloat16()) for cast, weight in zip(casts, given[1:], strict=True))


def test_a_weight_and_a_part_of_one_are_told_apart(decide, asked):
    decide(KernelPlan.FLOAT32)
    for _ in range(2):
        for weight in (nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(16, 8))[:8], torch.randn(8, 8)):
            run(linear, X, weight)
    assert len(asked) == 3
    run(linear, X, nn.Parameter(torch.randn(64)).view(8, 8))  # a view of all of a weight
    assert len(asked) == 3


def test_an_operator_that_is_removed_is_called_no_more(layer, decide, asked):
    library = torch.library.Library("polycast_test_removed", "FRAGMENT")
    library.define("op(Tensor x, Tensor weight, Tensor? bias, Tensor part, ScalarType dtype) -> Tensor")
    library.impl("op", lambda x, weight, bias, part, dtype: torch.ones(3, 8, dtype=dtype), "CPU")
    decide(Action(ActionKind.OPERATOR, 1, KernelPlan.AS_IT_IS, torch.ops.polycast_test_removed.op.default))
    run(layer, X)
    assert run(layer, X).eq(1).all()
    assert asked == ["linear"]
    decide(KernelPlan.FLOAT32)
    library._destroy()
    assert run(layer, X).isnan().all()  # Python's
    assert torch.equal(run(layer, X), layer(X).bfloat16())
    assert asked == ["linear"] * 2
