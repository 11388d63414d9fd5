"""Casts that are written: an op may return its input, and so a cached cast."""

import pytest
import torch

import polycast

X = torch.ones(4, 4, dtype=torch.bfloat16)
RETURNS_ITS_INPUT = "aten::alias"


@pytest.fixture(params=["own", "WeightCache"])
def region(request, engine):
    cache = None if request.param == "own" else polycast.WeightCache()
    return polycast.autocast("cpu", cache=cache, policy={RETURNS_ITS_INPUT: polycast.CastPolicy.LOWER_PRECISION_FP})


def ones(requires_grad):
    return torch.nn.Parameter(torch.ones(4, 4), requires_grad=requires_grad)


@pytest.mark.parametrize("take", [lambda weight: weight, torch.t], ids=["weight", "view"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_cast_that_was_written_is_not_used_again(region, requires_grad, take):
    weight = ones(requires_grad)
    with region:
        for _ in range(3):
            with torch.no_grad():
                torch.ops.aten.alias(take(weight)).zero_()
            assert torch.mm(X, take(weight))[0, 0] == 4


def test_a_cast_that_was_written_through_the_one_in_the_graph_is_not_used_again(region):
    weight = ones(requires_grad=True)
    with region:
        for _ in range(3):
            cast = torch.ops.aten.alias(weight)
            assert cast.requires_grad
            cast.mul_(0)
            assert torch.mm(X, weight)[0, 0] == 4
            with torch.no_grad():
                assert torch.mm(X, weight)[0, 0] == 4


def test_a_cast_that_was_written_is_not_used_by_other_threads(region, in_thread):
    weight = ones(requires_grad=True)

    def product():
        with region:
            torch.mm(X, weight)
            return torch.mm(X, weight)[0, 0].item()

    with region:
        torch.mm(X, weight)
        assert in_thread(product) == 4
        torch.ops.aten.alias(weight).mul_(0)
        assert in_thread(product) == 4


def test_backward_refuses_a_cast_that_was_written_since(region):
    weight = ones(requires_grad=True)
    with region:
        out = torch.mm(X.clone().requires_grad_(), weight)
        with torch.no_grad():
            torch.ops.aten.alias(weight).zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
