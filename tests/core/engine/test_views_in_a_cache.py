"""Views of weights in a WeightCache: which are cached, as casts of the weight or of a part, and for how long."""

import gc
import weakref

import pytest
import torch
from tests.engines import NATIVE
from torch import nn
from torch.autograd import forward_ad

import polycast

from .cached_casts import counts

pytestmark = NATIVE


def new_weight(*shape, frozen=False):
    generator = torch.Generator().manual_seed(len(shape))
    return nn.Parameter(torch.randn(*(shape or (8, 8)), generator=generator), requires_grad=not frozen)


def use(cache, *views):
    """Multiply by each of some tensors in a region with a cache, without grad, and check the products."""
    xs = [torch.linspace(-1, 1, 3 * len(view)).reshape(3, -1) for view in views]
    with torch.no_grad(), polycast.autocast("cpu", cache=cache):
        products = list(map(torch.mm, xs, views))
    for product, x, view in zip(products, xs, views, strict=True):
        plain, of = (each.as_subclass(torch.Tensor) for each in (product, view.detach()))
        assert torch.equal(plain, torch.mm(x.bfloat16(), of.bfloat16()))


def test_the_tangent_of_a_weight_and_of_its_views_is_kept(cache):
    w = new_weight()
    use(cache, w.T)
    before = counts(cache)
    with forward_ad.dual_level(), polycast.autocast("cpu", cache=cache):
        dual = forward_ad.make_dual(w, torch.ones(8, 8))
        views = dual, dual.T, forward_ad.make_dual(w.T, torch.ones(8, 8)), w.view(8, 8)
        *tangents, none = [forward_ad.unpack_dual(torch.mm(torch.ones(1, 8), view)).tangent for view in views]
    assert all(torch.equal(tangent, torch.full((1, 8), 8.0, dtype=torch.bfloat16)) for tangent in tangents)
    assert none is None
    assert counts(cache)[1] == before[1]


def test_a_view_of_the_whole_weight_is_served_from_the_weights_cast(cache):
    w = new_weight()
    for take in (torch.t, lambda w: w, lambda w: w.view(64).view(8, 8)) * 2:
        use(cache, take(w))
    assert counts(cache) == (5, 1)
    assert cache.stats().bytes == 64 * 2


def test_parts_of_a_weight_have_casts_of_their_own_in_a_cache(cache):
    w = new_weight(4, 8, 8)
    for index in (0, 1, 2, 3, 1) * 3:
        use(cache, w[index])
    assert counts(cache) == (11, 4)
    assert (cache.stats().entries, cache.stats().bytes) == (4, 4 * 64 * 2)


@pytest.mark.parametrize("take", [lambda w: w.chunk(4), lambda w: w.split([8, 24]), lambda w: w.view(4, 8, 8).unbind()])
def test_views_that_live_at_the_same_time_are_served_too(cache, take):
    w = new_weight(32, 8)
    for _ in range(2):
        use(cache, *(part.T for part in take(w)))
    assert counts(cache) == (len(take(w)), len(take(w)))


def test_parts_at_the_same_offset_with_other_strides_are_told_apart(cache):
    w = new_weight(24, 8)
    for _ in range(2):
        for part in (w[:8], w[:8].T, w[:8, :4], w[8:16], w.view(8, 24)[:, :8]):
            use(cache, part)
    assert counts(cache) == (5, 5)


@pytest.mark.parametrize("take", [lambda w: w.view(8, 16), lambda w: w[:8]], ids=["all", "part"])
def test_a_view_of_the_former_memory_of_a_weight_is_cast_from_it(cache, take):
    w = new_weight(16, 8)
    old = take(w)
    use(cache, old)
    w.data = torch.ones_like(w)
    use(cache, old)
    use(cache, take(w))
    assert not torch.equal(old, take(w))


def test_a_view_keeps_its_weight_and_the_cast_alive(cache):
    view = new_weight().T
    use(cache, view)
    use(cache, view)
    gc.collect()
    use(cache, view)
    assert counts(cache) == (2, 1)


@pytest.mark.parametrize("take", [lambda w: w, lambda w: w.T, lambda w: w[:4]], ids=["weight", "all", "part"])
def test_casts_are_freed_with_the_weight_and_do_not_keep_it_alive(cache, take):
    w = new_weight()
    use(cache, take(w))
    assert cache.stats().entries == 1
    dead = weakref.ref(w)
    del w
    gc.collect()
    assert dead() is None
    assert (cache.stats().entries, cache.stats().bytes) == (0, 0)


class Tagged(torch.Tensor):
    """A subclass that adds nothing."""


NOT_CACHED = {
    "detached": lambda w: w.detach(),
    "detached view": lambda w: w.T.detach(),
    "another dtype": lambda w: w.view(torch.int32).view(torch.float32),
    "negative": torch._neg_view,
    "conjugate": lambda w: torch.view_as_complex(w.view(8, 4, 2)).conj().imag,
    "data": lambda w: w.data,
    "more elements than the weight": lambda w: w[0].expand(9, 8),
    "subclass": lambda w: w.T.as_subclass(Tagged),
}


@pytest.mark.parametrize("name", NOT_CACHED)
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_other_tensors_than_plain_views_are_cast_at_each_use(cache, name, frozen, no_grad):
    view = NOT_CACHED[name](new_weight(frozen=frozen))
    use(cache, view)
    use(cache, view)
    assert counts(cache) == (0, 0)


def test_views_of_other_tensors_than_weights_are_cast_at_each_use(cache):
    use(cache, torch.ones(8, 8).T, (new_weight() * 2).T, new_weight().double().T.float(), new_weight().bfloat16().T)
    with torch.inference_mode():
        made = nn.Parameter(torch.ones(8, 8)).T
        use(cache, made)
    assert counts(cache) == (0, 0)


def test_max_bytes_limits_parts():
    w = new_weight(4, 8, 8)
    cache = polycast.WeightCache(max_bytes=2 * 64 * 2)
    for index in (0, 1, 2, 3) * 3:
        use(cache, w[index])
    assert cache.stats().bytes == 2 * 64 * 2


def test_parts_of_a_weight_take_no_more_memory_than_the_weight(cache, no_grad):
    w = new_weight(32, 8)
    for length in range(1, 32):
        use(cache, w[:length].T)
    assert 0 < cache.stats().bytes <= w.nbytes
    entries = cache.stats().entries
    w.add_(1)  # the cached casts are stale, and are evicted
    for length in range(24, 32):
        use(cache, w[:length].T)
    hits = cache.stats().hits
    use(cache, w[:24].T)
    assert cache.stats().hits == hits + 1
    assert cache.stats().bytes <= w.nbytes
    assert entries > 1
