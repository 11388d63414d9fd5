"""Prepacked weights: how long they are cached, and when they are made again."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.engines import NATIVE
from torch import nn

import polycast
from polycast import Int8, WeightCache, autocast
from polycast.engine import state
from polycast.engine.casts.cast_cache import process_cache
from polycast.engine.recipes.plan import plan_of
from polycast.plugin import Availability, Plan
from polycast.region.resolve import override_of
from polycast.registry.registry import registry

from .int8_linears import INT8, X, expected, run

pytestmark = [*NATIVE, pytest.mark.usefixtures("no_grad", "linear")]


def _sgd(fused):
    def update(layer):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, fused=fused)
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    return update


UPDATES = {
    "in place": lambda layer: layer.weight.mul_(2),
    "load_state_dict": lambda layer: layer.load_state_dict(nn.Linear(8, 8).state_dict()),
    "detached": lambda layer: layer.weight.detach().add_(1),
    "a view": lambda layer: layer.weight.detach()[2:].zero_(),
    ".data in place": lambda layer: layer.weight.data.mul_(2),
    ".data =": lambda layer: setattr(layer.weight, "data", torch.randn(8, 8)),
    "set_": lambda layer: layer.weight.set_(torch.randn(8, 8)),
    "an array": lambda layer: layer.weight.numpy(force=True).fill(1),
    "SGD": _sgd(fused=False),
    "fused SGD": _sgd(fused=True),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_a_written_weight_is_prepacked_again(layer, linear, update, cached):
    for change in (lambda layer: None, update):
        change(layer)
        for _ in range(2):
            assert torch.equal(run(layer, **cached), expected(layer))
    assert (linear.prepared, linear.ran) == (2, 4)


def test_verify_finds_an_unseen_write_of_a_prepacked_weight(layer, double_unseen):
    cache = WeightCache(verify=True)
    for _ in range(2):
        run(layer, cache=cache)
    double_unseen(layer.weight)
    with pytest.raises(polycast.errors.StaleWeightError, match="changed without a trace"):
        run(layer, cache=cache)
    cache.clear()
    assert torch.equal(run(layer, cache=cache), expected(layer))


def test_statistics_count_casts_and_prepacked_weights_separately(layer):
    cache = WeightCache()
    for recipe, casts in ((INT8, (0, 0)), (None, (2, 64 * 2 + 8 * 2))):
        run(layer, recipe=recipe, cache=cache)
        stats = cache.stats()
        assert (stats.entries, stats.bytes, stats.packings, stats.packed_bytes) == (*casts, 1, 64 + 32)


def _flatten(layer):
    flat = torch.nn.utils.parameters_to_vector(layer.parameters())
    layer.weight.data = flat[:64].view(8, 8)
    layer.bias.data = flat[64:]
    layer.flat = flat


@pytest.mark.parametrize("put", [nn.Module.share_memory, _flatten], ids=["in shared memory", "in a flat buffer"])
def test_a_weight_that_may_not_be_cached_is_not_prepacked(layer, linear, put, cached, declined):
    put(layer)
    assert torch.equal(run(layer, **cached), run(layer, recipe=None))
    assert declined(layer, **cached).startswith("something else holds the weight's memory")
    assert (linear.prepared, linear.ran) == (0, 0)


@pytest.mark.slow
def test_a_prepacked_weight_is_freed_with_its_weight(linear):
    layer, cache = nn.Linear(8, 8), WeightCache()
    run(layer, cache=cache)
    run(layer)
    before = process_cache.cache.stats().packings
    del layer
    gc.collect()
    assert (cache.stats().packings, process_cache.cache.stats().packings) == (0, before - 1)


@pytest.mark.parametrize("clear", [polycast.clear_autocast_cache, polycast.uninstall])
def test_clearing_and_uninstalling_empty_the_process_cache(layer, linear, clear):
    run(layer)
    clear()
    assert torch.equal(run(layer), expected(layer))
    assert linear.prepared == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("frozen", [True, False])
def test_weights_of_each_float_dtype_are_prepacked(layer, linear, dtype, frozen):
    layer.requires_grad_(not frozen).to(dtype)
    assert [run(layer).dtype for _ in range(2)] == [torch.bfloat16] * 2
    assert (linear.prepared, linear.ran) == (1, 2)


def test_a_prepacked_weight_made_in_any_grad_mode_serves_all(layer, linear):
    layer.requires_grad_(False)
    with torch.inference_mode():
        run(layer)
    with torch.enable_grad():
        assert not run(layer).requires_grad
    run(layer)
    assert (linear.prepared, linear.ran) == (1, 3)


def test_kernels_share_a_prepacked_weight_with_those_of_the_same_key_only(kernels):
    weight = nn.Parameter(torch.randn(8, 8))
    with autocast("cpu", recipe=INT8):
        for _ in range(2):
            by_row, by_column, same = nn.functional.linear(X, weight), torch.mm(X, weight), torch.matmul(X, weight)
    assert torch.equal(by_column, same)
    torch.testing.assert_close(by_row.float(), X @ weight.t(), rtol=0.05, atol=0.05)
    torch.testing.assert_close(by_column.float(), X @ weight, rtol=0.05, atol=0.05)
    assert [kernels[f"aten::{op}"].prepared for op in ("linear", "mm", "matmul")] == [1, 1, 0]


def test_a_weight_that_cannot_be_prepacked_is_tried_once(layer, linear):
    layer.weight[0, 0] = float("inf")
    fast = run(layer, recipe=None)
    for _ in range(3):
        assert torch.equal(run(layer), fast)
    assert (linear.prepared, linear.ran) == (1, 0)
    layer.weight[0, 0] = 1
    assert torch.equal(run(layer), expected(layer))


class Subclass(nn.Parameter):
    pass


NOT_CACHEABLE = "its weight is not a cacheable parameter"


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (nn.Parameter(torch.randn(4, 8)).t().contiguous().t(), NOT_CACHEABLE),
        ((nn.Parameter(torch.randn(8, 8)) * 1)[:4], NOT_CACHEABLE),
        (torch.randn(4, 8), NOT_CACHEABLE),
        (Subclass(torch.randn(4, 8)), NOT_CACHEABLE),
        (nn.Parameter(torch.randn(4, 8).double()), "a tensor is float64"),
        (nn.Parameter(torch.randn(4, 7)), "its features are odd in number"),
    ],
)
def test_an_unsupported_call_runs_in_the_fast_dtype_and_is_counted(linear, recipe_counts, weight, reason):
    x = torch.randn(3, weight.shape[1], dtype=torch.promote_types(weight.dtype, torch.float32))
    fast = run(nn.functional.linear, x, weight, recipe=None)
    with recipe_counts() as counts:
        assert torch.equal(run(nn.functional.linear, x, weight), fast)
    (record,) = counts.records()
    assert (record.op, record.recipe, record.device, record.calls) == ("aten::linear", "int8", "cpu", 1)
    assert record.declined.startswith(reason)
    assert linear.prepared == 0


def test_calls_fall_back_where_weights_are_not_cached(layer, linear):
    run(layer, cache_enabled=False)
    assert (linear.prepared, linear.ran) == (0, 0)


def test_writing_the_result_does_not_write_the_prepacked_weight(layer):
    first = run(layer)
    first.add_(1)
    assert torch.equal(run(layer), expected(layer))


@pytest.mark.parametrize("part", ["prepack", "run", "unsupported_reason"])
def test_an_error_of_a_kernel_propagates_and_caches_nothing(layer, linear, monkeypatch, part):
    def fails(*args):
        raise ZeroDivisionError(part)

    with monkeypatch.context() as broken:
        broken.setattr(linear, part, fails)
        polycast.clear_autocast_cache()
        with pytest.raises(ZeroDivisionError, match=part):
            run(layer)
    assert polycast.autocast_nesting("cpu") == 0
    if part == "prepack":
        polycast.uninstall()  # what is made of kernels is made once
    assert torch.equal(run(layer), expected(layer))


def test_threads_share_a_prepacked_weight(layer, linear):
    run(layer)

    def work(_):
        with torch.no_grad():
            return [torch.equal(run(layer), expected(layer)) for _ in range(20)]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [[True] * 20] * 4
    assert linear.prepared == 1


def test_a_kernel_may_return_another_dtype(layer, linear, monkeypatch):
    compute = type(linear).run
    monkeypatch.setattr(type(linear), "run", lambda *args: compute(*args).double())
    assert run(layer).dtype is torch.bfloat16


def test_functions_of_functorch_run_in_the_fast_dtype(layer, linear):
    mapped = run(torch.vmap(lambda x: nn.functional.linear(x, layer.weight)), X)
    assert (mapped.dtype, linear.ran) == (torch.bfloat16, 0)


def test_after_clearing_weights_can_be_swapped(layer):
    run(layer)
    polycast.clear_autocast_cache()
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.ones(8, 8)))
    assert torch.equal(run(layer), expected(layer))


def test_equal_recipes_share_plans():
    one, same, other = (Plan.of(polycast.plugin.get_backend("cpu"), Int8(min_size=size)) for size in (1, 1, 2))
    assert one is same is not other


def test_refresh_reaches_regions_that_were_made_before_and_keeps_prepacked_weights(layer, linear):
    backend, region = polycast.plugin.get_backend("cpu"), autocast("cpu", recipe=INT8)
    for available, ran in ((False, 0), (True, 1), (False, 1), (True, 2)):
        vars(backend).update(recipe_availability=lambda recipe, available=available: Availability(available))
        polycast.plugin.refresh("cpu")
        with region:
            layer(X)
        assert linear.ran == ran
    assert linear.prepared == 1


@pytest.mark.parametrize("name", ["native", "reference", "override"])
def test_devices_with_unusual_names_have_plans_of_their_own(monkeypatch, name):
    backend = copy.copy(polycast.plugin.get_backend("cpu"))
    vars(backend)["device_type"] = name
    with polycast.autocast("cpu", recipe=Int8(min_size=3)):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        override, _ = state.machine.innermost("cpu")
        monkeypatch.setattr(registry, "find", lambda _: backend)
        assert plan_of(override, name).device_type == name
    assert override_of(None, "cpu", override.recipe) is override


# ---- In a WeightCache with max_bytes.

PACKED = 64 + 32  # bytes of an 8x8 weight, prepacked
NO_ROOM = "the WeightCache has no room for its prepacked weight within max_bytes"


def test_max_bytes_limits_casts_and_prepacked_weights_together(layer, linear, declined):
    cache = WeightCache(max_bytes=PACKED + 2 * 8 * 8 + 2 * 8)
    for recipe in (None, INT8):
        run(layer, recipe=recipe, cache=cache)
    assert (cache.stats().entries, cache.stats().packings) == (2, 1)
    assert declined(nn.Linear(8, 8), cache=cache) == NO_ROOM
    assert (cache.stats().packings, linear.prepared) == (1, 1)


def test_a_weight_without_room_runs_in_the_fast_dtype_and_is_not_prepacked(layer, linear):
    cache = WeightCache(max_bytes=50)
    for _ in range(3):
        assert torch.equal(run(layer, cache=cache), run(layer, recipe=None))
    assert (linear.prepared, linear.ran) == (0, 0)


def test_a_weight_whose_prepacked_form_had_no_room_is_prepacked_once(layer, linear, declined):
    cache = WeightCache(max_bytes=PACKED - 1)
    assert torch.equal(run(layer, cache=cache), expected(layer))
    for _ in range(3):
        assert declined(layer, cache=cache) == NO_ROOM
    assert (linear.prepared, linear.ran, cache.stats().packings) == (1, 1, 0)


def test_a_model_larger_than_the_cache_keeps_the_prepacked_weights_that_fit(linear):
    cache = WeightCache(max_bytes=4 * PACKED)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)))
    for _ in range(40):
        run(model, cache=cache)
    assert (linear.prepared, linear.ran, cache.stats().evictions) == (4, 40 * 4, 0)


def test_alternating_models_are_seldom_prepacked_again(linear):
    cache = WeightCache(max_bytes=PACKED)
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    for _ in range(20):
        for layer in (one, one, one, other, other, other):
            run(layer, cache=cache)
    assert (linear.prepared, cache.stats().evictions) == (1, 0)


def test_an_unused_model_is_evicted(layer, linear, declined):
    cache = WeightCache(max_bytes=2 * PACKED)
    run(layer, cache=cache)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for _ in range(20):
        run(model, cache=cache)
    assert declined(model[0], cache=cache) == declined(model[1], cache=cache) == ""
    assert (linear.prepared, cache.stats().evictions) == (3, 1)


def test_an_updated_weight_has_the_room_that_it_had(layer, linear):
    cache = WeightCache(max_bytes=PACKED)
    for _ in range(3):
        assert torch.equal(run(layer, cache=cache), expected(layer))
        layer.weight.mul_(2)
    assert (linear.prepared, linear.ran) == (3, 3)
