"""The reference engine caches nothing: each use of a weight makes a cast, and gradients are summed as torch does."""

import sys

import pytest
import torch
from tests.core.rounding import Rounded
from torch import nn

import polycast

from .cached_casts import X, parameter, use
from .each_cache import frozen, with_each_cache

pytestmark = [
    pytest.mark.usefixtures("engine", "int8_kernels"),
    pytest.mark.parametrize("engine", ["reference"], indirect=True),
]
EMPTY = polycast.WeightCacheStats(entries=0, bytes=0, hits=0, misses=0, evictions=0)


@with_each_cache
def test_a_write_at_a_raw_pointer_is_seen(regions, double_unseen):
    weight = frozen()
    with regions() as check:
        for _ in range(3):
            check(weight, 1)
            double_unseen(weight)


def test_a_weight_cache_stays_empty(cache):
    weight = parameter()
    use(cache, weight), use(cache, weight)
    assert (cache.stats(), cache.entries()) == (EMPTY, [])
    assert repr(cache) == "<WeightCache: empty, since the reference engine caches no weights>"
    cache.adopt(weight, None, torch.bfloat16, [weight.detach().bfloat16()])
    cache.clear()
    assert cache.stats() == EMPTY


def test_a_recipe_prepacks_a_weight_at_each_use(cache, int8_kernels):
    weight, alias = frozen(), None
    for _ in range(2):
        with torch.no_grad(), polycast.autocast("cpu", cache=cache, recipe=Rounded(min_size=1)):
            nn.functional.linear(X, weight)
        alias = weight.data
    assert int8_kernels["aten::linear"].prepared == 2
    assert (cache.stats(), alias.shape) == (EMPTY, weight.shape)


def test_gradients_of_several_uses_are_torchs_bit_for_bit(any_cache):
    x = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))

    def gradient(region):
        weight = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))
        with region:
            for each in x:
                torch.mm(each, weight).float().square().sum().backward()
            sum(torch.mm(each, weight).float().square().sum() for each in x).backward()
        return weight.grad

    ours = gradient(polycast.autocast("cpu", cache=any_cache))
    polycast.uninstall()
    assert torch.equal(ours, gradient(torch.autocast("cpu")))


def test_a_weight_that_gets_other_sizes_in_a_region_has_their_gradient():
    weight = parameter()
    with polycast.autocast("cpu"):
        torch.mm(X, weight)
        weight.data = torch.ones(4, 2)
        (torch.mm(X, weight) + torch.mm(X, weight)).sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 2), 8.0))


def test_a_kernel_switches_no_grad_mode_which_a_signal_handler_could_leave_switched():
    weight, called = parameter(), []
    with polycast.autocast("cpu"):
        sys.setprofile(lambda frame, event, arg: called.append(getattr(arg, "__name__", frame.f_code.co_name)))
        try:
            torch.mm(X, weight)
        finally:
            sys.setprofile(None)
    assert "with_history" in called
    assert "_set_grad_enabled" not in called
