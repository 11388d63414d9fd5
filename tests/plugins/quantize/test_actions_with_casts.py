"""Actions that compute in float32, or with the cached cast of the weight."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from polycast import WeightCache
from polycast.engine.recipes.actions import Action, ActionKind
from polycast_plugins.quantize.kernel_plan import KernelPlan

from .int8_linears import X, run

pytestmark = pytest.mark.usefixtures("native", "no_grad", "kernel")


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


@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
def test_an_operator_gets_the_cached_cast(layer, decide, linear_of_cast, asked, cached):
    action, casts = linear_of_cast
    decide(action)
    settings = {"cache": WeightCache()} if cached else {}
    first, second = run(lambda: (layer(X), layer(X)), **settings)
    assert first.isnan().all()
    assert torch.equal(second, 2 * linear(X.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()))
    run(lambda: (layer(X), layer(X)), **settings)
    assert {cast.dtype for cast in casts} == {torch.bfloat16}
    assert casts[1].data_ptr() == casts[2].data_ptr()
    layer.weight.mul_(2)
    run(layer, X, **settings)
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
