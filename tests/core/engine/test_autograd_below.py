"""Autograd below the kernels: it records ops and views, and is skipped if there is nothing to record."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.functional import mse_loss
from torch.utils._pytree import tree_flatten

import polycast
from polycast_backends.cpu.instructions import has_lstm

pytestmark = pytest.mark.usefixtures("engine")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_tangent_goes_through_a_matrix_product(mode):
    x, tangent, w = torch.rand(2, 2), torch.rand(2, 2), torch.nn.Parameter(torch.rand(2, 2))
    with mode(), forward_ad.dual_level(), polycast.autocast("cpu"):
        dual = forward_ad.make_dual(x, tangent)
        product = forward_ad.unpack_dual(torch.mm(dual, w))
        assert torch.equal(product.tangent, torch.mm(tangent, w))
        assert torch.equal(product.primal, torch.mm(x, w))


def test_a_view_has_the_tangent_that_its_base_has_got():
    base, w = torch.zeros(4, 8), torch.randn(8, 8)
    view, tangent = base[:2], torch.randn(4, 8)
    with forward_ad.dual_level(), polycast.autocast("cpu"):
        base.copy_(forward_ad.make_dual(torch.randn(4, 8), tangent))
        found = forward_ad.unpack_dual(torch.mm(view, w)).tangent
    torch.testing.assert_close(found.float(), tangent[:2] @ w, rtol=0.05, atol=0.1)


def test_a_product_of_what_needs_no_gradient_needs_none_and_is_no_view():
    x, w = torch.rand(2, 2), torch.nn.Parameter(torch.rand(2, 2))
    with polycast.autocast("cpu"):
        with torch.no_grad():
            assert not torch.mm(x, w).requires_grad
        assert not torch.mm(x, x).requires_grad
        assert torch.mm(x, w).requires_grad
        with torch.inference_mode():
            assert torch.mm(x, w).is_inference()
        product = torch.mm(x, x)
        product.add_(1)  # as any other tensor, it may be written to, and counts it
        assert product._version == 1
        (product * w).sum().backward()
    assert torch.equal(w.grad, product.float())


OPS = {
    "trace": torch.trace,
    "mse_loss": lambda x: mse_loss(x, torch.zeros(2, 2)),
    "cat": lambda x: torch.cat([torch.ones(2, 2, dtype=torch.bfloat16), x]),
    "stack": lambda x: torch.stack([torch.ones(2, 2, dtype=torch.bfloat16), x]),
}


@pytest.mark.parametrize("op", OPS)
def test_an_op_of_the_table_is_differentiated_where_any_input_is(op):
    x = torch.rand(2, 2, requires_grad=True)
    with polycast.autocast("cpu"):
        assert not OPS[op](x.detach()).requires_grad
        result = OPS[op](x)
    result.sum().backward()
    expected = torch.autograd.grad(OPS[op](x).sum(), x)
    assert torch.equal(x.grad, *expected)


@pytest.mark.parametrize("op", OPS)
def test_a_tangent_goes_through_an_op_of_the_table(op):
    x, tangent = torch.rand(2, 2), torch.rand(2, 2)
    with torch.no_grad(), forward_ad.dual_level():
        with polycast.autocast("cpu"):
            seen = forward_ad.unpack_dual(OPS[op](forward_ad.make_dual(x, tangent)))
        expected = forward_ad.unpack_dual(OPS[op](forward_ad.make_dual(x, tangent)))
    assert torch.equal(seen.tangent, expected.tangent)


def test_a_cast_of_what_is_differentiated_is_recorded():
    x = torch.rand(2, 2, dtype=torch.bfloat16, requires_grad=True)
    with polycast.autocast("cpu"):
        mse_loss(x * 1, torch.zeros(2, 2)).backward()
    assert x.grad.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("policy", "view"),
    [
        ({"view_as_complex": "fp32"}, torch.view_as_complex),
        ({"atleast_1d": "fp32"}, torch.atleast_1d),
        ({"einsum": "fp32"}, lambda x: torch.einsum("ij->ji", x)),
    ],
    ids=["of the schema", "of an op made of others", "of a list"],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_view_of_an_input_stays_one(policy, view, mode):
    x = torch.rand(2, 2)
    with mode(), polycast.autocast("cpu", policy=policy):
        view(x).mul_(2)
    assert x._version == 1


def test_the_profiler_sees_a_matrix_product():
    x = torch.rand(2, 2)
    with torch.no_grad(), polycast.autocast("cpu"), torch.autograd.profiler.profile() as profile:
        torch.mm(x, x)
    assert "aten::mm" in {event.name for event in profile.function_events}


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell, nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_bias_that_is_not_there_is_not_differentiated(kind, mode):
    network, x = kind(4, 4, bias=False), torch.rand(3, 4)
    with mode(), polycast.autocast("cpu"):
        result = tree_flatten(network(x))[0]
    raises = kind is nn.LSTM and not has_lstm(torch.bfloat16)
    with mode(), nullcontext() if raises else torch.autocast("cpu", torch.bfloat16):
        expected = tree_flatten(network(x))[0]
    assert all(torch.equal(each, others) for each, others in zip(result, expected, strict=True))
