"""Cached casts in graphs: of regions made outside, of weights that change between calls; and untraceable graphs."""

import copy

import pytest
import torch
from tests.engines import NATIVE
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import polycast
from polycast import WeightCache
from polycast.engine import state

pytestmark = NATIVE
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
SIZE = 64


@pytest.fixture
def model():
    return nn.Linear(SIZE, SIZE, bias=False)


def counts(cache):
    return cache.stats().misses, cache.stats().hits


def _entered(region, model):
    def function(x):
        with region:
            return model(x)

    return function


def _decorated(region, model):
    return region(lambda x: model(x))


def _called(region, model):
    decorated = region(lambda x: model(x))
    return lambda x: decorated(x) + 1


@pytest.mark.slow
@BACKENDS
@pytest.mark.parametrize("use", [_entered, _decorated, _called])
def test_a_region_that_was_made_outside_has_its_cache(backend, use, model, cache):
    function = use(polycast.autocast("cpu", cache=cache), model)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            y = compiled(torch.ones(2, SIZE))
        torch.testing.assert_close(y, function(torch.ones(2, SIZE)), rtol=0.02, atol=0.02)
    assert counts(cache) == (1, 3)


def test_a_region_that_was_made_outside_has_it_after_a_graph_break(model, cache):
    region = polycast.autocast("cpu", cache=cache)

    @torch.compile(backend="aot_eager")
    def function(x):
        with region:
            x = model(x)
            torch._dynamo.graph_break()
            return model(x)

    with torch.no_grad():
        for _ in range(3):
            function(torch.ones(2, SIZE))
    assert counts(cache) == (1, 5)


class _Failing(torch.fx.Interpreter):
    def call_function(self, target, args, kwargs):
        if target is torch.relu:
            raise ValueError("cannot be traced")
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize("settings", [{}, {"policy": {"linear": "fp32"}}], ids=["cache", "policy"])
def test_a_graph_that_cannot_be_traced_leaves_no_region(settings, model, cache):
    @torch.compile(backend=lambda graph, inputs: _Failing(graph).run(*inputs))
    def function(x, cache):
        with polycast.autocast("cpu", cache=cache, **settings):
            return torch.relu(model(x))

    with pytest.raises(BackendCompilerFailed, match="cannot be traced"):
        function(torch.ones(2, SIZE), cache)
    assert state.machine.nesting("cpu") == 0
    polycast.uninstall()


@pytest.mark.slow
def test_a_weight_that_the_code_itself_changes(model):
    cache, x = WeightCache(verify=True), torch.randn(4, SIZE)

    def function(x):
        y = model(x)
        model.weight.mul_(2)
        return y, model(x)

    other = copy.deepcopy(model)
    compiled = torch.compile(function, fullgraph=True)
    for _ in range(3):
        with torch.no_grad():
            with polycast.autocast("cpu", cache=cache):
                before, after = compiled(x)
            with polycast.autocast("cpu"):
                torch.testing.assert_close(before, other(x), rtol=0.02, atol=0.02)
                other.weight.mul_(2)
                torch.testing.assert_close(after, other(x), rtol=0.02, atol=0.02)


def _new_data(model):
    model.weight.data = torch.randn(SIZE, SIZE)


def _another_parameter(model):
    model.weight = nn.Parameter(torch.randn(SIZE, SIZE))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.load_state_dict({"weight": torch.randn(SIZE, SIZE)}),
        _new_data,
        _another_parameter,
    ],
    ids=["load_state_dict", "new data", "another parameter"],
)
def test_a_change_of_the_weight(model, change):
    cache, x = WeightCache(verify=True), torch.randn(4, SIZE)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        with torch.no_grad(), polycast.autocast("cpu", cache=cache):
            found = compiled(x), compiled(x)
        with torch.no_grad(), polycast.autocast("cpu"):
            expected = model(x)
        assert all(torch.equal(each, expected) for each in found)
        change(model)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_writes_through_data_in_compiled_code(model, backend):
    weight, cache, x = model.requires_grad_(False).weight, WeightCache(), torch.randn(4, SIZE)
    polycast.install("cpu")

    @torch.compile(backend=backend, fullgraph=True)
    def write():
        weight.data.add_(1)

    with torch.no_grad():
        for settings in ({"cache": cache}, {}) * 3:
            with polycast.autocast("cpu", **settings):
                for change in (lambda: None, write, lambda: None):
                    change()
                    assert torch.equal(model(x), nn.functional.linear(x.bfloat16(), weight.bfloat16()))
