"""Cached casts in compiled code: where they are used, and when code is compiled again."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.engines import NATIVE
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import polycast
from polycast import WeightCache

pytestmark = NATIVE
CAST = torch.ops.polycast.cached_cast
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


@pytest.fixture
def model():
    return mlp()


@pytest.fixture
def compiled(model, backend):
    """Return the model, compiled."""
    return torch.compile(model, backend=backend, fullgraph=True)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_a_cast_of_a_weight_is_used_in_each_call(model, compiled, backend, frozen, cache, in_region, no_grad):
    model.requires_grad_(not frozen)
    for expected in [(2, 0), (2, 2), (2, 4), (2, 6)]:
        y = in_region(compiled, inputs(), cache=cache)
        assert counts(cache) == expected  # the cast of a bias is not worth an operator
    expected = in_torchs(torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True), inputs())
    assert torch.equal(y, expected)


def test_eager_and_compiled_code_share_a_cast(model, compiled, cache, in_region, no_grad):
    in_region(compiled, inputs(), cache=cache)
    expected = in_region(model, inputs(), cache=cache)
    made = cache.stats().misses
    y = in_region(compiled, inputs(), cache=cache)
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)
    assert cache.stats().misses == made


def test_another_cache_does_not_recompile_and_no_cache_does_once(backend, cache, in_region, no_grad):
    counter, other = CompileCounterWithBackend(backend), WeightCache(verify=True)
    compiled = torch.compile(mlp(), backend=counter, fullgraph=True)
    outputs = [in_region(compiled, inputs(), cache=each) for each in (cache, other, cache)]
    assert counter.frame_count == 1
    outputs += [in_region(compiled, inputs(), cache=each) for each in (None, other, cache, other, None, cache)]
    assert counter.frame_count == 2
    assert all(torch.equal(y, outputs[0]) for y in outputs)
    assert (cache.stats().hits, other.stats().hits) == (6, 4)


def test_in_a_region_without_a_cache_the_code_is_torchs(model, cache, in_region, no_grad):
    recorder = AotEagerAndRecordGraphs()
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    for each in (cache, None):
        in_region(compiled, inputs(), cache=each)
    assert ["polycast" in str(graph.graph) for graph in recorder.fw_graphs] == [True, False]


def test_code_compiled_in_a_region_of_torchs_is_recompiled(compiled, cache, in_region, no_grad):
    expected = in_torchs(compiled, inputs())
    assert torch.equal(in_region(compiled, inputs(), cache=cache), expected)
    assert counts(cache) == (2, 0)


@pytest.mark.slow
def test_a_region_in_compiled_code_has_its_own_cache(backend, model, cache, in_region, no_grad):
    other = WeightCache(verify=True)

    def function(x, inner):
        with polycast.autocast("cpu", cache=inner):
            y = model(x)
        return model(y)  # in the outer region

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for inner in (cache, cache, cache, other, other, cache):
        y = in_region(compiled, inputs(), inner, cache=None)
    hits, of_other = cache.stats().hits, other.stats().hits
    assert torch.equal(y, in_torchs(torch.compile(lambda x: model(model(x)), backend=backend), inputs()))
    assert hits >= 2
    assert of_other <= 2


@pytest.mark.slow
@pytest.mark.parametrize("made", ["inside", "outside"])
def test_a_region_after_a_graph_break_has_its_cache(backend, model, cache, made, no_grad):
    region = polycast.autocast("cpu", cache=cache)

    def function(x):
        with region if made == "outside" else polycast.autocast("cpu", cache=cache):
            y = model[0](x)
            torch._dynamo.graph_break()
            return model[2](y)

    compiled = torch.compile(function, backend=backend)
    for _ in range(3):
        compiled(inputs())
    assert counts(cache) == (2, 4)


@pytest.mark.slow
def test_compiled_code_runs_after_its_cache_was_deleted(backend, model, no_grad):
    def function(x, cache):
        with polycast.autocast("cpu", cache=cache):
            return model(x)

    cache = WeightCache()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    expected = compiled(inputs(), cache)
    number = cache.identity
    del cache
    gc.collect()
    assert torch.equal(CAST(model[0].weight, torch.bfloat16, number), model[0].weight.bfloat16())
    assert torch.equal(compiled(inputs(), WeightCache()), expected)


def test_threads_call_one_compiled_function_in_their_own_regions(compiled, in_region):
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
def test_inner_regions_that_are_disabled_or_of_another_dtype_compute_as_in_eager(
    backend, model, cache, in_region, no_grad
):
    def function(x):
        first = model(x)
        with polycast.autocast("cpu", enabled=False):
            second = model(x)
        with polycast.autocast("cpu", torch.float16):
            third = model(x)
        return first, second, third

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for _ in range(2):
        outputs, expected = in_region(compiled, inputs(), cache=cache), in_region(function, inputs())
        torch.testing.assert_close(outputs, expected, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_gradients_equal_torchs_and_later_forwards_hit(backend, model, compiled, cache, in_region):
    theirs = mlp()
    reference = torch.compile(theirs, backend=backend, fullgraph=True)
    for micro_batch in range(4):
        x = inputs() * (micro_batch + 1)
        in_region(compiled, x, cache=cache).float().square().sum().backward()
        in_torchs(reference, x).float().square().sum().backward()
    for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    assert cache.stats().misses == 2
    assert cache.stats().hits >= 6


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"freezing": True}, {"max_autotune": True}], ids=["freezing", "max_autotune"])
def test_options_of_inductor(options, cache, in_region, no_grad):
    compiled = torch.compile(mlp(), fullgraph=True, options=options)
    expected = in_torchs(torch.compile(mlp(), fullgraph=True), inputs())
    for _ in range(2):
        torch.testing.assert_close(in_region(compiled, inputs(), cache=cache), expected, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_dynamic_shapes(backend, cache, in_region, no_grad):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(mlp(), backend=counter, fullgraph=True, dynamic=True)
    for rows in (2, 3, 7):
        in_region(compiled, torch.randn(rows, SIZE), cache=cache)
    assert counter.frame_count == 1
    assert counts(cache) == (2, 4)


def test_compiled_code_runs_after_uninstall(model, compiled, cache, in_region, no_grad):
    expected = in_region(compiled, inputs(), cache=cache)
    polycast.uninstall()
    assert torch.equal(CAST(model[0].weight, torch.bfloat16), model[0].weight.bfloat16())
    assert torch.equal(in_region(compiled, inputs(), cache=cache), expected)


def test_a_fake_cast_shares_the_storage_of_its_weight():
    with FakeTensorMode() as mode:
        weight = mode.from_tensor(torch.randn(4, 6).t())
        cast = CAST(weight, torch.bfloat16)
    assert (cast.dtype, cast.shape, cast.stride()) == (torch.bfloat16, weight.shape, weight.stride())
    assert cast.untyped_storage()._cdata == weight.untyped_storage()._cdata


def test_the_operator_is_kept_out_of_cudagraphs():
    assert torch.Tag.cudagraph_unsafe in CAST.default.tags
