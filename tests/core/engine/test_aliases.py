"""Aliases that share no version counter with the weight: .data, arrays, storages, sparse tensors.

Writes through them are seen, and casts are cached beside those through which nothing can be written unseen.
"""

import numpy as np
import pytest
import torch
from tests.core.rounding import Rounded
from tests.engines import NATIVE
from torch import nn
from torch.utils import swap_tensors
from torch.utils.dlpack import from_dlpack, to_dlpack

import polycast
from polycast.engine import state

from .each_cache import ALIASES, CACHES, SIZE, X, frozen, is_right, product, with_each_cache

pytestmark = [
    *NATIVE,
    pytest.mark.usefixtures("int8_kernels"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
]


@with_each_cache
@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize(("alias_of", "write"), ALIASES.values(), ids=ALIASES)
def test_writes_through_a_live_alias_are_seen(regions, made, alias_of, write):
    weight = frozen()
    polycast.install("cpu")
    alias = alias_of(weight) if made == "before" else None
    with regions() as check:
        if made == "after":
            check(weight)
            alias = alias_of(weight)
        for turn in range(4):
            write(alias, float(turn + 2))
            check(weight)


@pytest.mark.parametrize(
    ("regions", "alias"),
    [
        *(("a plain region", alias) for alias in ("data", "an array", "the storage")),
        ("a cache", "data"),
        ("a recipe", "data"),
    ],
)
def test_writes_through_an_alias_older_than_polycasts_hooks_are_seen(regions, alias):
    alias_of, write = ALIASES[alias]
    polycast.uninstall()
    weight = frozen()
    alias = alias_of(weight)
    with CACHES[regions]() as check:
        for turn in range(4):
            check(weight, 2)
            write(alias, float(turn + 2))
            check(weight, 1)


def test_a_plain_region_caches_no_frozen_weight_on_the_memory_of_an_array():
    array = np.ones((SIZE, SIZE), np.float32)
    weight = nn.Parameter(torch.from_numpy(array), requires_grad=False)
    with polycast.autocast("cpu"):
        for _ in range(4):
            assert is_right(weight)
            assert is_right(weight)
            array += 1
        assert is_right(weight)


def test_writes_of_a_weight_are_seen_once_it_is_frozen_inside_a_region():
    weight = nn.Parameter(torch.ones(SIZE, SIZE))
    alias = weight.data
    with polycast.autocast("cpu"):
        product(weight), product(weight)
        alias.fill_(3)  # of which a region of torch's sees nothing either, while the weight requires grad
        del alias
        weight.requires_grad_(False)
        assert is_right(weight)


def test_a_write_is_seen_in_grad_mode_with_a_cache(cache):
    def check():
        for _ in range(2):
            assert product(weight)[0, 0] == SIZE * weight[0, 0].item()

    weight = nn.Parameter(torch.ones(SIZE, SIZE))
    alias = weight.data
    with polycast.autocast("cpu", cache=cache):
        for turn in range(4):
            check()
            alias.fill_(turn + 2)
        del alias
        for turn in range(4):
            check()
            weight.data.fill_(turn + 7)
            check()
            from_dlpack(to_dlpack(weight)).fill_(turn + 9)
        check()


@with_each_cache
@pytest.mark.parametrize("swap", [torch.utils.swap_tensors, swap_tensors], ids=["attribute", "name"])
def test_a_cached_frozen_weight_can_be_swapped(regions, swap):
    weight = frozen()
    with regions() as check:
        check(weight)
        swap(weight, frozen(5.0))
        assert weight[0, 0] == 5
        check(weight)


def use(weight, cache, **settings):
    """Multiply by a weight in a region, and check the result against the weight's current value."""
    with torch.no_grad(), polycast.autocast("cpu", cache=cache, **settings):
        product = nn.functional.linear(X, weight)
    torch.testing.assert_close(product.float(), SIZE * weight.detach(), rtol=0.01, atol=0)


@pytest.mark.parametrize(
    "alias_of", [lambda weight: weight.data, torch.Tensor.untyped_storage], ids=["data", "storage"]
)
def test_casts_are_cached_again_once_an_alias_is_freed(cache, alias_of):
    weight = frozen()
    alias = alias_of(weight)
    use(weight, cache), use(weight, cache)
    assert (cache.stats().entries, cache.stats().hits) == (0, 0)
    del alias
    use(weight, cache), use(weight, cache)
    assert (cache.stats().entries, cache.stats().hits) == (1, 1)


def test_an_alias_of_one_weight_does_not_drop_the_casts_of_others(cache):
    one, other = frozen(), frozen()
    use(one, cache), use(other, cache)
    one.data.add_(1)
    assert cache.stats().entries == 1
    use(other, cache)
    assert cache.stats().hits == 1


def test_a_kernel_that_reads_the_weight_as_an_array_prepacks_it_once(int8_kernels, cache):
    class ReadsAnArray(type(int8_kernels["aten::linear"])):
        def prepack(self, weight):
            return super().prepack(torch.from_numpy(weight.numpy().copy()))

    int8_kernels["aten::linear"], weight = ReadsAnArray(), frozen()
    for _ in range(3):
        use(weight, cache, recipe=Rounded(min_size=1))
    assert int8_kernels["aten::linear"].prepared == 1


def test_casts_are_cached_beside_aliases_that_share_the_version_counter(cache):
    weight = frozen()
    layer = nn.Linear(SIZE, SIZE, bias=False)
    layer.weight = weight
    held = [layer.state_dict(), weight.detach(), weight.view(-1), weight[:2], nn.Parameter(weight)]
    for turn in range(3):
        for _ in range(3):
            use(weight, cache)
        held[1].fill_(turn + 2)
    assert (cache.stats().misses, cache.stats().hits) == (3, 6)


def test_an_alias_of_the_former_memory_is_not_taken_for_one_of_the_weight(cache):
    weight = frozen()
    polycast.install("cpu")
    held = weight.detach()
    weight.data = torch.full((SIZE, SIZE), 2.0)  # `held` shares the version counter still, but not the memory
    alias = weight.data
    for turn in range(4):
        use(weight, cache), use(weight, cache)
        alias.fill_(turn + 3)
    use(weight, cache)
    assert held[0, 0] == 1


def test_a_recipe_reports_that_an_alias_may_write_the_weight(int8_kernels, recipe_counts):
    weight = frozen()
    alias = weight.data
    with recipe_counts() as counts:
        use(weight, None, recipe=Rounded(min_size=1))
    assert ["made through .data" in each.declined for each in counts.records()] == [True]
    assert alias.numel() == weight.numel()  # the alias is alive


def test_a_write_of_another_weight_during_prepacking_is_seen(cache):
    def prepack(weight):
        written.data.fill_(3)
        return (weight.clone(),)

    written = frozen()
    use(written, cache)
    state.machine.prepacked(cache, frozen(), 1, prepack)
    use(written, cache)
