"""Recipe "fastest" in training: operands that share memory or history, masks, and what is a weight."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import polycast

pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture(name="region", params=["plain", "fastest"])
def _region(request, float32_way):
    return lambda: polycast.autocast("cpu", recipe=float32_way if request.param == "fastest" else None)


def attention_operands(dtype=torch.bfloat16):
    return [torch.randn(2, 3, 24, 16).to(dtype).requires_grad_() for _ in range(3)]


def gradient(region, call, x, create_graph):
    with sdpa_kernel(SDPBackend.MATH):
        with region():
            y = call(x)
        (found,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=create_graph)
    return found.detach().float()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: F.scaled_dot_product_attention(x, x * 2, x),
        lambda x: F.scaled_dot_product_attention(x, *([x.transpose(-1, -2).transpose(-1, -2)] * 2)),
    ],
    ids=["one tensor", "a key from the query", "views"],
)
def test_the_gradient_with_a_graph_is_that_without_one(region, call):
    x = attention_operands()[0]
    without, with_graph = (gradient(region, call, x, create_graph) for create_graph in (False, True))
    torch.testing.assert_close(with_graph, without, rtol=0.02, atol=0.02)


def test_a_hook_on_an_operand_runs_once_with_a_graph(region):
    x = attention_operands()[0]
    query, calls = x * 1, []
    query.register_hook(calls.append)
    gradient(region, lambda x: F.scaled_dot_product_attention(query, x, x), x, True)
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_mask_may_be_made_in_inference_mode(region, dtype):
    operands = attention_operands(torch.float32)
    with torch.inference_mode():
        mask = torch.ones(24, 24).tril().to(dtype)
    with region():
        F.scaled_dot_product_attention(*operands, mask).float().sum().backward()
    assert all(each.grad.isfinite().all() for each in operands)


def test_a_boolean_mask_may_be_refilled_before_the_backward(region):
    operands = attention_operands(torch.float32)
    mask = torch.ones(24, 24, dtype=torch.bool).tril()

    def gradients(change):
        given = mask.clone()
        with region():
            y = F.scaled_dot_product_attention(*operands, given)
        if change:
            given.fill_(True)
        return torch.autograd.grad(y.float().square().sum(), operands)

    unchanged = gradients(False)
    for _ in range(2):  # by Python, and natively
        assert all(map(torch.equal, gradients(True), unchanged))


class OwnParameter(nn.Parameter):
    """A subclass of Parameter without a dispatch of its own."""


LEAF, OWN = torch.randn(16, 8, requires_grad=True), OwnParameter(torch.randn(8, 16))


@pytest.mark.parametrize(("leaf", "weight"), [(LEAF, LEAF.t), (OWN, lambda: OWN)], ids=["view of a leaf", "subclass"])
def test_equal_calls_have_equal_gradients(float32_way, leaf, weight):
    x, gradient, found = torch.randn(48, 16, requires_grad=True), torch.randn(48, 8).bfloat16(), []
    for _ in range(2):
        with polycast.autocast("cpu", recipe=float32_way):
            y = F.linear(x, weight())
        found.append(torch.autograd.grad(y, (x, leaf), gradient))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: nn.Linear(16, 16), (4, 16)), (lambda: nn.Conv2d(16, 16, 3), (2, 16, 8, 8))],
    ids=["linear", "conv2d"],
)
def test_a_frozen_parameter_may_be_made_in_inference_mode(region, make, shape):
    with torch.inference_mode():
        layer = make().requires_grad_(False)
    x = torch.randn(shape, requires_grad=True)
    for _ in range(2):
        with region():
            y = layer(x)
        (found,) = torch.autograd.grad(y.float().sum(), x)
        assert found.isfinite().all()


def test_a_program_may_set_float32_as_the_fast_dtype(profile_of):
    recipe = polycast.Fastest(profile_of(overhead=1e-15, bfloat16=9.0, float32_kernel=0.1))
    layer, x = nn.Linear(300, 200), torch.ones(1, 300)
    with torch.no_grad(), contextlib.ExitStack() as stack:
        expected = layer(x)
        stack.enter_context(polycast.autocast("cpu", recipe=recipe))
        stack.callback(torch.set_autocast_dtype, "cpu", torch.get_autocast_dtype("cpu"))
        torch.set_autocast_dtype("cpu", torch.float32)
        assert torch.equal(layer(x), expected)
