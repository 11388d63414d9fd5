"""Cached casts in compiled code: where they are used, and when code is compiled again."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from functorch.compile import make_boxed_func
from tests.engines import NATIVE
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import polycast
from polycast import WeightCache

pytestmark = NATIVE
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
SIZE = 64


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE))


def inputs():
    return torch.linspace(-1, 1, 2 * SIZE).reshape(2, SIZE)


def in_torchs(function, *args):
    with torch.autocast("cpu"):
        return function(*args)


def counts(cache):
    """Return misses and hits."""
    return cache.stats().misses, cache.stats().hits


@pytest.mark.slow
@BACKENDS
@pytest.mark.parametrize("frozen", [False, True])
def test_a_cast_of_a_weight_is_used_in_each_call(backend, frozen, cache, in_region):
    model = mlp().requires_grad_(not frozen)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for expected in [(2, 0), (2, 2), (2, 4), (2, 6)]:
            y = in_region(compiled, inputs(), cache=cache)
            assert counts(cache) == expected  # the cast of a bias is not worth an operator
        expected = in_torchs(torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True), inputs())
    assert torch.equal(y, expected)


@BACKENDS
def test_eager_and_compiled_code_share_a_cast(backend, cache, in_region):
    model = mlp()
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend)
        in_region(compiled, inputs(), cache=cache)
        expected = in_region(model, inputs(), cache=cache)
        made = cache.stats().misses
        y = in_region(compiled, inputs(), cache=cache)
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)
    assert cache.stats().misses == made


@BACKENDS
def test_another_cache_does_not_recompile_and_no_cache_does_once(backend, cache, in_region):
    counter, other = CompileCounterWithBackend(backend), WeightCache(verify=True)
    compiled = torch.compile(mlp(), backend=counter, fullgraph=True)
    with torch.no_grad():
        outputs = [in_region(compiled, inputs(), cache=each) for each in (cache, other, cache)]
        assert counter.frame_count == 1
        outputs += [in_region(compiled, inputs(), cache=each) for each in (None, other, cache, other, None, cache)]
    assert counter.frame_count == 2
    assert all(torch.equal(y, outputs[0]) for y in outputs)
    assert (cache.stats().hits, other.stats().hits) == (6, 4)


def traced(function, *args):
    """Return the graph of ATen ops that a function is compiled to."""
    graphs = []
    backend = aot_autograd(fw_compiler=lambda graph, _: graphs.append(graph) or make_boxed_func(graph.forward))
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*args)
    return str(graphs[0].graph)


def test_in_a_region_without_a_cache_the_code_is_torchs(cache, in_region):
    model = mlp()
    assert "polycast" in in_region(traced, model, inputs(), cache=cache)
    torch.compiler.reset()
    assert "polycast" not in in_region(traced, model, inputs())


def test_code_compiled_in_a_region_of_torchs_is_recompiled(cache, in_region):
    compiled = torch.compile(mlp(), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected = in_torchs(compiled, inputs())
        assert torch.equal(in_region(compiled, inputs(), cache=cache), expected)
    assert counts(cache) == (2, 0)


@pytest.mark.slow
@BACKENDS
def test_a_region_in_compiled_code_has_its_own_cache(backend, cache, in_region):
    model, other = mlp(), WeightCache(verify=True)

    def function(x, inner):
        with polycast.autocast("cpu", cache=inner):
            y = model(x)
        return model(y)  # in the outer region

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with torch.no_grad():
        for inner in (cache, cache, cache, other, other, cache):
            y = in_region(compiled, inputs(), inner, cache=None)
        hits, of_other = cache.stats().hits, other.stats().hits
        assert torch.equal(y, in_torchs(torch.compile(lambda x: model(model(x)), backend=backend), inputs()))
    assert hits >= 2
    assert of_other <= 2


@pytest.mark.slow
@BACKENDS
def test_a_region_after_a_graph_break_has_its_cache(backend, cache):
    model = mlp()

    def function(x):
        with polycast.autocast("cpu", cache=cache):
            y = model[0](x)
            torch._dynamo.graph_break()
            return model[2](y)

    compiled = torch.compile(function, backend=backend)
    with torch.no_grad():
        for _ in range(3):
            compiled(inputs())
    assert counts(cache) == (2, 4)


@pytest.mark.slow
@BACKENDS
def test_compiled_code_runs_after_its_cache_was_deleted(backend):
    model, cache = mlp(), WeightCache()

    def function(x, cache):
        with polycast.autocast("cpu", cache=cache):
            return model(x)

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with torch.no_grad():
        expected = compiled(inputs(), cache)
        operator = torch.ops.polycast.cached_cast.default
        number = cache.identity
        del cache
        gc.collect()
        cast = operator(model[0].weight, torch.bfloat16, number)
        assert torch.equal(cast, model[0].weight.bfloat16())
        assert torch.equal(compiled(inputs(), WeightCache()), expected)


@BACKENDS
def test_threads_call_one_compiled_function_in_their_own_regions(backend, in_region):
    model = mlp()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    caches = [WeightCache(verify=True) for _ in range(4)]

    def work(cache):
        with torch.no_grad():
            return [in_region(compiled, inputs(), cache=cache) for _ in range(3)][-1]

    work(WeightCache())
    first = work(caches[0])
    with ThreadPoolExecutor(3) as threads:
        assert all(torch.equal(each, first) for each in threads.map(work, caches[1:]))
    assert [sum(counts(each)) for each in caches] == [6] * 4
    # A view that another thread is making counts as an alias until it shares the version counter.
    assert all(counts(each) in ((2, 4), (3, 3)) for each in caches)


@pytest.mark.slow
@BACKENDS
def test_inner_regions_that_are_disabled_or_of_another_dtype_compute_as_in_eager(backend, cache, in_region):
    model = mlp()

    def function(x):
        first = model(x)
        with polycast.autocast("cpu", enabled=False):
            second = model(x)
        with polycast.autocast("cpu", torch.float16):
            third = model(x)
        return first, second, third

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            outputs = in_region(compiled, inputs(), cache=cache)
            for y, expected in zip(outputs, in_region(function, inputs(), cache=None), strict=True):
                torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)


@pytest.mark.slow
@BACKENDS
def test_gradients_equal_torchs_and_later_forwards_hit(backend, cache, in_region):
    ours, theirs = mlp(), mlp()
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    reference = torch.compile(theirs, backend=backend, fullgraph=True)
    for micro_batch in range(4):
        x = inputs() * (micro_batch + 1)
        in_region(compiled, x, cache=cache).float().square().sum().backward()
        in_torchs(reference, x).float().square().sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    assert cache.stats().misses == 2
    assert cache.stats().hits >= 6


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"freezing": True}, {"max_autotune": True}], ids=["freezing", "max_autotune"])
def test_options_of_inductor(options, cache, in_region):
    compiled = torch.compile(mlp(), fullgraph=True, options=options)
    with torch.no_grad():
        expected = in_torchs(torch.compile(mlp(), fullgraph=True), inputs())
        for _ in range(2):
            torch.testing.assert_close(in_region(compiled, inputs(), cache=cache), expected, rtol=0.02, atol=0.02)


@pytest.mark.slow
@BACKENDS
def test_dynamic_shapes(backend, cache, in_region):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(mlp(), backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (2, 3, 7):
            in_region(compiled, torch.randn(rows, SIZE), cache=cache)
    assert counter.frame_count == 1
    assert counts(cache) == (2, 4)


def test_compiled_code_runs_after_uninstall(cache, in_region):
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected = in_region(compiled, inputs(), cache=cache)
        polycast.uninstall()
        operator = torch.ops.polycast.cached_cast.default
        assert torch.equal(operator(model[0].weight, torch.bfloat16), model[0].weight.bfloat16())
        assert torch.equal(in_region(compiled, inputs(), cache=cache), expected)


def test_a_fake_cast_shares_the_storage_of_its_weight():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        weight = mode.from_tensor(torch.randn(4, 6).t())
        cast = torch.ops.polycast.cached_cast(weight, torch.bfloat16)
    assert (cast.dtype, cast.shape, cast.stride()) == (torch.bfloat16, weight.shape, weight.stride())
    assert cast.untyped_storage()._cdata == weight.untyped_storage()._cdata


def test_the_operator_is_kept_out_of_cudagraphs():
    assert torch.Tag.cudagraph_unsafe in torch.ops.polycast.cached_cast.default.tags
