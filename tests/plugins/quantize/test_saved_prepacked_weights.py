"""The CPU's prepacked weights in saved caches."""

import pytest
import torch
from torch import nn

import polycast
from polycast import Int4, Int8, WeightCache, autocast

pytestmark = pytest.mark.usefixtures("engine", "no_grad")
RECIPES = [Int8(min_size=1), Int8("tensor", min_size=1), Int4(min_size=1), Int4(64, min_size=1)]


def run(model, cache, recipe):
    with autocast("cpu", cache=cache, recipe=recipe):
        return model(torch.linspace(-1, 1, 512).view(2, 256))


@pytest.fixture(autouse=True)
def _is_available():
    for recipe in RECIPES:
        if not polycast.plugin.check(polycast.plugin.get_backend("cpu"), recipe):
            pytest.skip(f"{recipe} is not available on this machine")


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(256, 192), nn.Linear(192, 100))


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_they_are_found(model, tmp_path, recipe):
    cache = WeightCache()
    expected = run(model, cache, recipe)
    assert cache.stats().packings == 2
    cache.save(tmp_path / "model", model)
    loaded = WeightCache.load(tmp_path / "model", model)
    assert torch.equal(run(model, loaded, recipe), expected)
    assert (loaded.stats().packings, loaded.stats().hits, loaded.stats().misses) == (2, 2, 0)


def test_each_recipe_finds_its_own(model, tmp_path):
    cache = WeightCache()
    expected = [run(model, cache, recipe) for recipe in RECIPES]
    cache.save(tmp_path / "model", model)
    loaded = WeightCache.load(tmp_path / "model", model)
    for recipe, output in zip(RECIPES, expected, strict=True):
        assert torch.equal(run(model, loaded, recipe), output)
    assert loaded.stats().misses == 0


def test_another_group_size_is_made(model, tmp_path):
    cache = WeightCache()
    run(model, cache, Int4(32, min_size=1))
    cache.save(tmp_path / "model", model)
    loaded = WeightCache.load(tmp_path / "model", model)
    output = run(model, loaded, Int4(64, min_size=1))
    assert loaded.stats().misses == 2
    assert torch.equal(output, run(model, WeightCache(), Int4(64, min_size=1)))
