"""Profiles, and the recipes "fastest" and float8, in eager and compiled code. They need a CUDA device."""

import copy

import pytest
import torch
from torch import nn

import polycast

from .graphs import captured_call

FLOAT8 = polycast.plugin.check(polycast.plugin.get_backend("cuda"), polycast.Float8())
pytestmark = [
    pytest.mark.usefixtures("engine"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.filterwarnings("ignore:Float8.* is experimental"),
]
with_float8 = pytest.mark.skipif(not FLOAT8, reason=f"no float8 here: {FLOAT8.reason}")


def model(features=256):
    torch.manual_seed(0)
    layers = (nn.Linear(features, features), nn.GELU(), nn.Linear(features, features))
    return nn.Sequential(*layers).cuda().requires_grad_(False)


def inputs(rows=32, features=256):
    torch.manual_seed(1)
    return torch.randn(rows, features, device="cuda")


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def exact(net, x):
    return copy.deepcopy(net).double()(x.double())


def test_a_profile_has_the_ways_of_the_device():
    profile = polycast.profile("cuda", refresh=True)
    linears = [each for each in profile.measurements if each.op == "linear"]
    assert {"float32", "float16", "bfloat16"} <= {each.way for each in linears}
    assert all(each.seconds > 0 for each in profile.measurements)
    assert polycast.profile("cuda") == profile


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # inductor's advice on products in float32
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_fastest_is_as_exact_as_the_fast_dtype(compiled):
    net, x = model(), inputs()
    run = torch.compile(net, fullgraph=True) if compiled else net
    with torch.no_grad():
        with polycast.autocast("cuda"):
            plain = net(x)
        with polycast.autocast("cuda", recipe="fastest"):
            out = run(x)
    assert out.dtype is torch.float16
    assert relative_error(out, exact(net, x)) < 1.1 * relative_error(plain, exact(net, x)) + 1e-4
    torch.compiler.reset()


def test_fastest_trains_as_a_plain_region_does():
    def gradients(**settings):
        net, x = model().requires_grad_(), inputs()
        with polycast.autocast("cuda", torch.bfloat16, **settings):
            loss = net(x).float().square().mean()
        loss.backward()
        return [parameter.grad for parameter in net.parameters()]

    for actual, expected in zip(gradients(recipe="fastest"), gradients(), strict=True):
        assert relative_error(actual, expected) < 0.02


@with_float8
@pytest.mark.parametrize("scales", ["row", "tensor"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_region_with_float8_runs_linears_in_it(scales, compiled):
    net, x, cache = model(), inputs(), polycast.WeightCache()
    run = torch.compile(net, fullgraph=True) if compiled else net
    recipe = polycast.Float8(scales=scales, min_size=0)
    with torch.no_grad():
        with polycast.autocast("cuda", recipe=recipe, cache=cache):
            first = run(x)
        with polycast.autocast("cuda", recipe=recipe, cache=cache):
            again = run(x)
    assert cache.stats().packings == 2
    assert first.dtype is torch.float16
    assert torch.equal(first, again)
    assert 1e-3 < relative_error(first, exact(net, x)) < 0.1
    torch.compiler.reset()


@with_float8
def test_weights_in_float8_follow_updates():
    net, x, cache = model(), inputs(), polycast.WeightCache()
    with torch.no_grad(), polycast.autocast("cuda", recipe=polycast.Float8(min_size=0), cache=cache):
        before = net[0](x)
        net[0].weight.mul_(2)
        net[0].bias.mul_(2)
        after = net[0](x)
    torch.testing.assert_close(after, before * 2, rtol=1e-2, atol=1e-2)


@with_float8
def test_a_graph_captured_in_a_region_with_float8_replays_new_inputs():
    net, x, cache = model(), inputs(), polycast.WeightCache()
    region = polycast.autocast("cuda", recipe=polycast.Float8(min_size=0), cache=cache)
    with torch.no_grad():
        graph, captured = captured_call(net, x, region)
        x.copy_(inputs() * 3)
        graph.replay()
        with region:
            expected = net(x)
    assert relative_error(captured, expected) < 0.1  # a graph records no cached weight: it computes in float16


def test_tune_finds_a_policy_by_time():
    net, x = model(), inputs()
    result = polycast.tune(net, [x], tolerance=0.01, device_type="cuda", objective="time")
    with torch.no_grad(), polycast.autocast("cuda"), polycast.apply_policy(net, result.policy):
        assert relative_error(net(x), exact(net, x)) < 0.02
