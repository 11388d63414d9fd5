"""Cached casts in graphs whose region was made outside, and in graphs that cannot be traced."""

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import polycast
from polycast.engine import state

pytestmark = pytest.mark.usefixtures("engine")
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
