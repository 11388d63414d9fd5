"""Calls that recipes leave to the fast dtype: unusual tensors, modes, transforms and autograd."""

import copy
import warnings

import pytest
import torch
from tests.core.engine.wrapped import Wrapped
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import polycast
from polycast import Int8, autocast
from polycast.engine.casts.cast_cache import process_cache
from polycast.plugin import explain_op

from .conftest import AVAILABLE
from .int8_linears import INT8, X, run


@pytest.fixture
def layer(linear):
    return nn.Linear(8, 8).requires_grad_(False)


def outcome(function):
    try:
        return function().device
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("wrapped", ["input", "bias"])
def test_a_subclass_that_sees_each_op_sees_the_fast_dtypes(layer, linear, wrapped):
    given = {"input": X, "weight": layer.weight, "bias": layer.bias}
    given[wrapped] = Wrapped(given[wrapped])
    assert torch.equal(run(lambda: functional.linear(**given)).inner, run(layer, recipe=None))
    assert linear.ran == 0


def test_a_fake_tensor_outside_of_its_mode_stays_fake(layer, linear):
    x = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(X)
    assert run(layer, x).dtype is torch.bfloat16
    assert linear.ran == 0


@pytest.mark.parametrize("on_meta", ["input", "weight", "bias"])
def test_a_meta_tensor_gives_the_result_of_the_fast_dtype(layer, linear, on_meta):
    given = {"input": X, "weight": layer.weight, "bias": layer.bias}
    given[on_meta] = nn.Parameter(given[on_meta].to("meta"), requires_grad=False)
    of_recipe, fast = (outcome(lambda r=r: run(lambda: functional.linear(**given), recipe=r)) for r in (INT8, None))
    assert of_recipe == fast
    assert (linear.prepared, linear.ran) == (0, 0)


def test_a_nested_tensor_is_computed_in_the_fast_dtype(layer, linear):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are a prototype
        x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    assert run(layer, x).is_nested
    assert linear.ran == 0


@pytest.mark.parametrize("sparse", ["input", "weight"])
def test_no_kernel_is_asked_of_a_tensor_that_is_not_strided(layer, linear, sparse):
    given = {"input": X, "weight": layer.weight}
    given[sparse] = nn.Parameter(given[sparse].to_sparse(), requires_grad=False)
    with torch.no_grad(), autocast("cpu"):
        explained = explain_op("linear", "cpu", (*given.values(), None), recipe=INT8)
    assert explained.declined == "a tensor is not strided"


@pytest.mark.usefixtures("no_grad")
def test_a_call_is_explained(layer):
    def explained(x, weight, **settings):
        return explain_op("linear", "cpu", (x, weight), **settings)

    with autocast("cpu", recipe=INT8):
        assert "the recipe int8 computes it, or its inputs are cast" in str(explain_op("linear", "cpu"))
        computed = explained(X, layer.weight)
        assert (computed.recipe, computed.declined) == ("int8", None)
        assert [argument.is_cast for argument in computed.arguments] == [False, False]
        assert explained(X[:, :4], layer.weight[:, :4]).declined is None
        other = explained(X, layer.weight * 1)
        assert "its weight is not a cacheable parameter" in other.declined
        assert "declines: its weight is not a cacheable parameter" in str(other)
        assert explained(X[:, :7], nn.Parameter(torch.ones(2, 7))).declined == "its features are odd in number"
        assert explained(*torch.ones(2, 2, 8, device="meta")).declined is None
        assert explain_op("softmax", "cpu").recipe == ""
    assert explained(X, layer.weight, recipe=INT8).recipe == "int8"
    assert explained(X, layer.weight).recipe == ""


def test_a_tangent_is_that_of_the_fast_dtype(layer, linear, no_grad):
    def tangent():
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(layer(forward_ad.make_dual(X, torch.ones_like(X)))).tangent

    assert torch.equal(run(tangent), run(tangent, recipe=None))
    assert linear.ran == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_torchscript_traces_the_fast_dtype_without_a_warning(layer, linear):
    traced = run(lambda: torch.jit.trace(lambda x: functional.linear(x, layer.weight), X, check_trace=False))
    assert "polycast::" not in str(traced.graph)
    assert linear.ran == 0


class Product(torch.autograd.Function):
    @staticmethod
    @polycast.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    @polycast.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient.mm(weight), x.t().mm(gradient.float()).t()


def test_a_custom_function_runs_in_the_fast_dtype(layer, linear, kernels):
    weight, x = nn.Parameter(torch.randn(8, 8)), X.clone().requires_grad_()
    run(Product.apply, x, weight).float().sum().backward()
    assert [kernel.ran for kernel in kernels.values()] == [0, 0, 0]
    assert x.grad is not None
    with torch.inference_mode():
        run(Product.apply, X, weight)
    assert linear.ran == 1


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_a_checkpoint_recomputes_unrecorded_ops_in_the_same_way(layer, linear, reentrant, nested):
    head, seen = nn.Linear(8, 8), []

    def forward(x, unused):
        seen.append(layer(x))
        return head(seen[-1])

    def block(x, differentiable):
        if nested:
            return checkpoint(forward, x, differentiable, use_reentrant=False)
        return forward(x, differentiable)

    differentiable = torch.zeros(1, requires_grad=True)
    y = run(lambda: checkpoint(block, X, differentiable, use_reentrant=reentrant))
    y.float().sum().backward()
    assert len(seen) >= 2
    assert all(torch.equal(seen[0], each) for each in seen)


@pytest.mark.parametrize("key", [None, "rows"])
@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_equal_recipes_share_prepacked_weights(layer, linear, key, monkeypatch):
    monkeypatch.setattr(type(linear), "prepack_key", key)
    for _ in range(3):
        run(layer, recipe=Int8(min_size=1))
    assert (linear.prepared, linear.ran) == (1, 3)


def test_another_instance_of_a_backend_has_its_own_prepacked_weights(layer, linear, other_cpu):
    cache = polycast.WeightCache()
    run(layer, cache=cache)
    doubled = copy.copy(linear)
    doubled.prepack = lambda weight: tuple(part * 2 for part in linear.prepack(weight / 2))
    other_cpu(low_bit_kernels=lambda recipe: {"aten::linear": doubled})
    run(layer, cache=cache)
    assert linear.prepared == 2


@pytest.mark.parametrize("nothing", [(), []])
def test_an_empty_result_of_prepack_means_that_it_cannot(layer, linear, monkeypatch, nothing):
    monkeypatch.setattr(type(linear), "prepack", lambda *args: nothing)
    assert [run(layer).dtype for _ in range(2)] == [torch.bfloat16] * 2
    assert linear.ran == 0


def test_prepack_must_not_return_a_bare_tensor(layer, linear, monkeypatch):
    monkeypatch.setattr(type(linear), "prepack", lambda kernel, weight: weight.clone())
    with pytest.raises(TypeError, match="must return a tuple"):
        run(layer)


def test_kernels_that_are_first_asked_for_under_a_mode_have_plain_tensors(layer, linear):
    made, backend = [], polycast.plugin.get_backend("cpu")
    offered = backend.low_bit_kernels
    vars(backend)["low_bit_kernels"] = lambda recipe: made.append(torch.ones(2)) or offered(recipe)
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        run(layer)
    assert [(type(each), each.is_inference()) for each in made] == [(torch.Tensor, False)]


@pytest.mark.skipif(not AVAILABLE, reason="no int8 here")
def test_a_weight_without_memory_is_refused_as_in_the_fast_dtype(engine):
    weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not allocated"):
        run(functional.linear, X, weight)
    assert process_cache.cache.stats().packings == 0


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_a_bias_that_is_not_there_is_none_for_a_kernel(linear, kind):
    cell = kind(8, 8, bias=False)
    with torch.no_grad():
        run(cell)
    assert linear.ran == 2
