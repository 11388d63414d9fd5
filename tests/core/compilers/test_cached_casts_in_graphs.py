"""Cached casts in graphs: of regions made outside, of weights that change, of code that writes; untraceable graphs."""

import copy

import pytest
import torch
from tests.engines import NATIVE
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import polycast
from polycast.engine import state

pytestmark = NATIVE
SIZE = 64


@pytest.fixture
def model():
    return nn.Linear(SIZE, SIZE, bias=False)


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
@pytest.mark.parametrize("use", [_entered, _decorated, _called])
def test_a_region_that_was_made_outside_has_its_cache(backend, use, model, cache, no_grad):
    function = use(polycast.autocast("cpu", cache=cache), model)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for _ in range(3):
        y = compiled(torch.ones(2, SIZE))
    torch.testing.assert_close(y, function(torch.ones(2, SIZE)), rtol=0.02, atol=0.02)
    assert (cache.stats().misses, cache.stats().hits) == (1, 3)


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
def test_a_weight_that_the_code_itself_changes(model, cache, in_region, no_grad):
    def function(model, x):
        y = model(x)
        model.weight.mul_(2)
        return y, model(x)

    x, other = torch.randn(4, SIZE), copy.deepcopy(model)
    compiled = torch.compile(function, fullgraph=True)
    for _ in range(3):
        found, expected = in_region(compiled, model, x, cache=cache), in_region(function, other, x)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


CHANGES = {
    "load_state_dict": lambda model: model.load_state_dict({"weight": torch.randn(SIZE, SIZE)}),
    "new data": lambda model: setattr(model.weight, "data", torch.randn(SIZE, SIZE)),
    "another parameter": lambda model: setattr(model, "weight", nn.Parameter(torch.randn(SIZE, SIZE))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_weight(model, cache, change):
    x, compiled = torch.randn(4, SIZE), torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        with torch.no_grad(), polycast.autocast("cpu", cache=cache):
            found = compiled(x), compiled(x)
        with torch.no_grad(), polycast.autocast("cpu"):
            expected = model(x)
        assert all(torch.equal(each, expected) for each in found)
        change(model)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_writes_through_data_in_compiled_code(model, backend, no_grad):
    weight, cache, x = model.requires_grad_(False).weight, polycast.WeightCache(), torch.randn(4, SIZE)
    polycast.install("cpu")

    @torch.compile(backend=backend, fullgraph=True)
    def write():
        weight.data.add_(1)

    for settings in ({"cache": cache}, {}) * 3:
        with polycast.autocast("cpu", **settings):
            for change in (lambda: None, write, lambda: None):
                change()
                assert torch.equal(model(x), nn.functional.linear(x.bfloat16(), weight.bfloat16()))


def _the_cast(w, x=None):
    return torch.einsum("ij->ij", w)


PROGRAMS = {
    "writes its first": lambda w, x: torch.index_put(w, (torch.tensor([1]),), x[0]) * 2,
    "returns the cast and more": lambda w, x: (_the_cast(w), torch.mm(x, w)),
    "uses it last": lambda w, x: torch.relu(torch.mm(x, w) + 1),
    "as a bias": lambda w, x: torch.addmm(w, x, w).relu(),
    "the cast": _the_cast,
    "the cast twice": lambda w, x: (_the_cast(w), _the_cast(w)),
    "a view": lambda w, x: torch.einsum("ij->ji", w),
    "a part": lambda w, x: _the_cast(w)[3:5, 2:],
    "several parts": lambda w, x: _the_cast(w).chunk(2)[1],
    "from a branch": lambda w, x: torch.cond(w.sum() > -1e9, _the_cast, lambda w: _the_cast(w) * 2, (w,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_neither_compiled_code_nor_its_caller_writes_a_cached_cast(backend, grad, name, cache, in_region):
    w, x = nn.Parameter(torch.randn(SIZE, SIZE)), torch.randn(SIZE, SIZE)
    policy = {"index_put": "lower_precision_fp", "einsum": "lower_precision_fp"}

    def call(function, cache):
        outputs = in_region(function, w, x, cache=cache, policy=policy)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    compiled = torch.compile(PROGRAMS[name], backend=backend, fullgraph=True)
    with torch.set_grad_enabled(grad):
        expected = call(compiled, None)
        for _ in range(3):
            outputs = call(compiled, cache)
            torch.testing.assert_close(outputs, expected, rtol=0, atol=0, check_stride=True)
            if grad:
                sum(y.float().square().sum() for y in outputs).backward()
            outputs[0].detach().mul_(3)  # the caller owns the results
            torch.testing.assert_close(outputs[1:], expected[1:], rtol=0, atol=0)
            for y in outputs[1:]:
                y.detach().mul_(3)
    with torch.no_grad():
        call(PROGRAMS[name], cache)  # compares the cast with its weight once more
