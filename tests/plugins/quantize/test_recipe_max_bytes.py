"""Prepacked weights in a WeightCache with max_bytes: which are cached, and which are evicted."""

import pytest
import torch
from tests.engines import NATIVE
from torch import nn

from polycast import WeightCache, autocast

from .int8_linears import X, expected, run

pytestmark = [*NATIVE, pytest.mark.usefixtures("no_grad")]

PACKED = 64 + 32  # bytes of an 8x8 weight, prepacked


@pytest.fixture
def layer(linear):
    return nn.Linear(8, 8)


def test_max_bytes_limits_casts_and_prepacked_weights_together(layer, linear, declined):
    cache = WeightCache(max_bytes=PACKED + 2 * 8 * 8 + 2 * 8)
    with autocast("cpu", cache=cache):
        layer(X)
    run(layer, cache=cache)
    assert (cache.stats().entries, cache.stats().packings) == (2, 1)
    other = nn.Linear(8, 8)
    assert declined(other, cache=cache) == "the WeightCache has no room for its prepacked weight within max_bytes"
    assert (cache.stats().packings, linear.prepared) == (1, 1)


def test_a_weight_without_room_runs_in_the_fast_dtype_and_is_not_prepacked(layer, linear):
    cache = WeightCache(max_bytes=50)
    with autocast("cpu"):
        fast = layer(X)
    for _ in range(3):
        assert torch.equal(run(layer, cache=cache), fast)
    assert (linear.prepared, linear.ran) == (0, 0)


def test_a_weight_whose_prepacked_form_had_no_room_is_prepacked_once(layer, linear, declined):
    cache = WeightCache(max_bytes=PACKED - 1)
    assert torch.equal(run(layer, cache=cache), expected(layer))
    for _ in range(3):
        assert declined(layer, cache=cache) == "the WeightCache has no room for its prepacked weight within max_bytes"
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
