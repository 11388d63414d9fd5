"""Prepacked weights of one WeightCache: apart for recipes that pack differently, shared by those that do not."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from tests.engines import NATIVE
from torch import nn

import polycast
from polycast import Int8, WeightCache
from polycast.policy import recipe_settings
from polycast.policy.recipe import kinds
from polycast.policy.recipe_settings import ObjectDigest
from polycast_plugins.quantize import LowBitMatmul, LowBitRecipe

from .conftest import AVAILABLE
from .int8_linears import run

pytestmark = [*NATIVE, pytest.mark.usefixtures("no_grad")]

X = torch.randn(3, 64)


class Grouped(LowBitRecipe):
    kind = "packed-in-groups"
    group_size: Literal[16, 32] = 32
    ops: Sequence[str] = ("linear", "mm")
    min_size: int = 0


del kinds[Grouped.kind]


@pytest.fixture(autouse=True)
def _only_for_these_tests(monkeypatch):
    monkeypatch.setitem(kinds, Grouped.kind, Grouped)


class Product(LowBitMatmul):
    def __init__(self, group_size):
        self.group_size, self.packed = group_size, 0

    def prepack(self, weight):
        self.packed += 1
        groups = weight.float().unflatten(1, (-1, self.group_size))
        scale = groups.abs().amax(2, keepdim=True) / 7
        return ((groups / scale).round() * scale).flatten(1), torch.tensor(self.group_size)

    def multiply(self, x, packed, bias, alpha):
        weight, group_size = packed
        assert int(group_size) == self.group_size
        return nn.functional.linear(x.float(), weight, bias).bfloat16()


@pytest.fixture
def products(other_cpu):
    """Register a backend for the CPU with kernels for the recipe; return its products, by group size."""
    products = {size: Product(size) for size in (16, 32)}
    other_cpu(
        recipe_availability=lambda recipe: polycast.plugin.Availability(isinstance(recipe, Grouped)),
        low_bit_kernels=lambda recipe: products[recipe.group_size].kernels(),
    )
    yield products
    polycast.clear_autocast_cache()


def test_two_group_sizes_do_not_share_a_prepacked_weight(products, cached):
    layer = nn.Linear(64, 8)
    for _ in range(3):
        for size in (16, 32):
            expected = products[size].multiply(X, products[size].prepack(layer.weight), layer.bias, 1.0)
            assert torch.equal(run(layer, X, recipe=Grouped(size), **cached), expected)
    assert [product.packed - 3 for product in products.values()] == [1, 1]


def test_recipes_that_pack_alike_share_a_prepacked_weight(products):
    layer, cache = nn.Linear(64, 8), WeightCache()
    for recipe in (Grouped(16), Grouped(16, min_size=1), Grouped(16, ops=("linear",))):
        run(layer, X, recipe=recipe, cache=cache)
    assert (products[16].packed, cache.stats().packings) == (1, 1)


@pytest.mark.skipif(not AVAILABLE, reason="the CPU has no such kernels")
def test_a_calibration_that_becomes_known_is_used(monkeypatch):
    monkeypatch.setattr(recipe_settings, "objects", {})
    factors = 2.0 ** torch.arange(64).remainder(5)
    calibration = SimpleNamespace(digest="0f", prepack_arguments=lambda weight, levels: (factors,))
    layer, unknown = nn.Linear(64, 8), Int8(min_size=0, calibration=ObjectDigest("0f"))
    with pytest.raises(RuntimeError, match=r"not have its calibration.*load it with polycast\.Calibration\.load"):
        run(layer, X, recipe=unknown)
    expected = run(layer, X, recipe=Int8(min_size=0, calibration=calibration))
    assert torch.equal(run(layer, X, recipe=unknown), expected)
    assert not torch.equal(run(layer, X, recipe=Int8(min_size=0)), expected)
