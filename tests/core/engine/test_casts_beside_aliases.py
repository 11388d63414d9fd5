"""Casts of weights with aliases: which are cached, and which an alias drops."""

import pytest
import torch
from tests.core.rounding import Rounded
from torch import nn

import polycast
from polycast.engine import state

pytestmark = pytest.mark.usefixtures("engine")
SIZE = 4
X = torch.ones(SIZE, SIZE, dtype=torch.bfloat16)


def new_weight():
    return nn.Parameter(torch.ones(SIZE, SIZE), requires_grad=False)


def use(weight, cache, **settings):
    """Multiply by a weight in a region, and check the result against the weight's current value."""
    with torch.no_grad(), polycast.autocast("cpu", cache=cache, **settings):
        product = nn.functional.linear(X, weight)
    torch.testing.assert_close(product.float(), SIZE * weight.detach(), rtol=0.01, atol=0)


def test_casts_are_cached_again_once_an_alias_is_freed():
    weight, cache = new_weight(), polycast.WeightCache()
    alias = weight.data
    use(weight, cache), use(weight, cache)
    assert (cache.stats().entries, cache.stats().hits) == (0, 0)
    del alias
    use(weight, cache), use(weight, cache)
    assert (cache.stats().entries, cache.stats().hits) == (1, 1)


def test_casts_are_cached_after_a_storage_object_is_dropped():
    weight, cache = new_weight(), polycast.WeightCache()
    weight.untyped_storage()
    for _ in range(3):
        use(weight, cache)
    assert cache.stats().hits == 2


def test_an_alias_of_one_weight_does_not_drop_the_casts_of_others():
    one, other, cache = new_weight(), new_weight(), polycast.WeightCache()
    use(one, cache), use(other, cache)
    one.data.add_(1)
    assert cache.stats().entries == 1
    use(other, cache)
    assert cache.stats().hits == 1


def test_a_kernel_that_reads_the_weight_as_an_array_prepacks_it_once(int8_kernels):
    class ReadsAnArray(type(int8_kernels["aten::linear"])):
        def prepack(self, weight):
            return super().prepack(torch.from_numpy(weight.numpy().copy()))

    int8_kernels["aten::linear"] = ReadsAnArray()
    weight, cache = new_weight(), polycast.WeightCache()
    for _ in range(3):
        use(weight, cache, recipe=Rounded(min_size=1))
    assert int8_kernels["aten::linear"].prepared == 1


def versioned_aliases(weight):
    layer = nn.Linear(SIZE, SIZE, bias=False)
    layer.weight = weight
    return [layer.state_dict(), weight.detach(), weight.view(-1), weight[:2], nn.Parameter(weight)]


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # Python cannot tell which share the version
def test_casts_are_cached_beside_aliases_that_share_the_version_counter():
    weight, cache = new_weight(), polycast.WeightCache()
    held = versioned_aliases(weight)
    for turn in range(3):
        for _ in range(3):
            use(weight, cache)
        held[1].fill_(turn + 2)
    assert (cache.stats().misses, cache.stats().hits) == (3, 6)


def test_an_alias_of_the_former_memory_is_not_taken_for_one_of_the_weight():
    weight, cache = new_weight(), polycast.WeightCache()
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
    weight = new_weight()
    alias = weight.data
    with recipe_counts() as counts:
        use(weight, None, recipe=Rounded(min_size=1))
    assert ["made through .data" in each.declined for each in counts.records()] == [True]
    assert alias.numel() == weight.numel()  # the alias is alive


def test_a_write_of_another_weight_during_prepacking_is_seen():
    def prepack(weight):
        written.data.fill_(3)
        return (weight.clone(),)

    cache, written = polycast.WeightCache(), new_weight()
    use(written, cache)
    state.machine.prepacked(cache, new_weight(), 1, prepack)
    use(written, cache)
