"""Regions with the recipe "fastest" keep what the engine promises to all regions."""

import gc
import sys

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import polycast
from polycast import autocast


def test_a_view_has_the_tangent_that_its_base_has_got(engine):
    base, w = torch.zeros(4, 8), torch.randn(8, 8)
    view, tangent = base[:2], torch.randn(4, 8)
    with forward_ad.dual_level(), autocast("cpu", recipe="fastest"):
        base.copy_(forward_ad.make_dual(torch.randn(4, 8), tangent))
        found = forward_ad.unpack_dual(torch.mm(view, w)).tangent
    torch.testing.assert_close(found.float(), tangent[:2] @ w, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("engine", ["native"], indirect=True)
@pytest.mark.parametrize("ratio", [None, 0.5, 2.0], ids=["int8", "a quick dtype", "a slow dtype"])
def test_a_backward_inside_of_a_region_asks_once(engine, asked, profile_of, ratio, request):
    model, x, steps = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(32, 64), []
    if ratio is None:
        request.getfixturevalue("int8_kernels")
    recipe = polycast.Int8(min_size=1) if ratio is None else polycast.Fastest(profile_of(bfloat16=ratio), min_size=1)
    for inside in (True, True, False):
        model.zero_grad()
        with autocast("cpu", recipe=recipe):
            loss = model(x).float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        steps.append(([parameter.grad.clone() for parameter in model.parameters()], len(asked)))
    (first, asked_first), (again, asked_again), (outside, _) = steps
    assert asked_again == asked_first
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    torch.testing.assert_close(again, outside, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"norm_first": True}], ids=str)
def test_the_result_of_an_encoder_layer_may_be_written_where_autograd_records(engine, options):
    module = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options).eval()
    x, parameter = torch.randn(3, 7, 16), nn.Parameter(torch.zeros(16))
    with torch.no_grad(), autocast("cpu", recipe="fastest"):
        results = [module(x) for _ in range(3)]
    for result in results:
        assert not result._is_view()
        result += parameter
        assert result.requires_grad


def test_a_region_is_collected_in_a_kernel(engine):
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), polycast.autocast_nesting("cpu")

    def generator():
        with autocast("cpu", recipe="fastest"):
            yield

    weight, x = nn.Parameter(torch.randn(64, 64)), torch.randn(4, 64)
    with torch.no_grad(), autocast("cpu", recipe="fastest"):
        nn.functional.linear(x, weight)
    suspended = generator()
    next(suspended)
    cycle = [suspended]
    cycle.append(cycle)
    gc.collect()
    gc.disable()
    del suspended, cycle

    def collect(frame, event, _):
        if event == "call" and frame.f_code.co_name == "perform":
            sys.setprofile(None)
            gc.collect()

    sys.setprofile(collect)
    try:
        with torch.no_grad():
            nn.functional.linear(torch.ones(3, 64), weight)
    finally:
        sys.setprofile(None)
        gc.enable()
    after = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), polycast.autocast_nesting("cpu")
    assert after == before
