"""WeightCache: casts that outlive regions, and are never stale."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.engines import NATIVE
from torch import nn

import polycast

from .cached_casts import BYTES, X, counts, parameter, use

pytestmark = NATIVE


@pytest.mark.parametrize("weight", [parameter(), parameter(requires_grad=False)], ids=["trainable", "frozen"])
def test_a_cast_outlives_the_region(cache, weight):
    for _ in range(3):
        use(cache, weight)
    assert cache.stats() == polycast.WeightCacheStats(entries=1, bytes=BYTES, hits=2, misses=1, evictions=0)


def test_regions_inside_keep_casts_where_the_enclosing_one_does(cache):
    weight = parameter()
    with polycast.autocast("cpu", cache=cache):
        with polycast.autocast("cpu"):
            torch.mm(X, weight)
        with polycast.autocast("cpu", cache_enabled=False):
            torch.mm(X, weight)
        torch.mm(X, weight)
    assert counts(cache) == (1, 1)


@pytest.mark.parametrize("take", [lambda weight: weight, lambda weight: weight[:, :2]], ids=["weight", "part"])
def test_two_dtypes_live_side_by_side(cache, take):
    weight = parameter(3.0)
    for dtype in (torch.bfloat16, torch.float16) * 2:
        assert torch.equal(use(cache, take(weight), dtype), torch.mm(X.to(dtype), take(weight).to(dtype)))
    assert counts(cache) == (2, 2)


MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
def test_a_cast_made_in_one_grad_mode_serves_the_others(first, second, trainable, any_cache):
    weight, x = parameter(requires_grad=trainable), X.clone().requires_grad_()
    with polycast.autocast("cpu", cache=any_cache):
        for mode in (first, second, "grad"):
            with MODES[mode]():
                out = torch.mm(x, weight)
    out.float().sum().backward()
    assert torch.equal(x.grad, torch.full((4, 4), 4.0, dtype=torch.bfloat16))
    assert not trainable or torch.equal(weight.grad, torch.full((4, 4), 4.0))
    assert any_cache is None or counts(any_cache) == (2, 1)


def test_double_backward_goes_through_a_cached_cast(cache):
    def derivatives(weight, multiply):
        out = multiply(weight).float()
        (first,) = torch.autograd.grad((out**3).sum(), weight, create_graph=True)
        return first, torch.autograd.grad(first.sum(), weight)[0]

    weight = parameter(2.0)
    with torch.no_grad():
        use(cache, weight)
    found = derivatives(weight, lambda weight: use(cache, weight))
    expected = derivatives(parameter(2.0), lambda weight: torch.mm(X.float(), weight))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("options", [{}, {"verify": True}, {"max_bytes": 300}], ids=str)
def test_gradients_with_a_cache_are_those_of_a_plain_region_bit_for_bit(options):
    def gradients(**region):
        torch.manual_seed(0)
        recurrent, shared = model = nn.ModuleList([nn.GRU(8, 8, num_layers=2), nn.Linear(8, 8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            with polycast.autocast("cpu", **region):
                hidden, _ = recurrent(torch.randn(5, 2, 8))
                for _ in range(3):
                    hidden = torch.relu(shared(hidden.float()))
                loss = hidden.float().pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [weight.grad for weight in model.parameters()]

    expected = gradients()
    actual = gradients(cache=polycast.WeightCache(**options))
    assert all(map(torch.equal, actual, expected))


def test_weights_keep_no_cache_alive():
    cache, weight = polycast.WeightCache(), parameter()
    use(cache, weight)
    dead = weakref.ref(cache)
    del cache
    gc.collect()
    assert dead() is None
    del weight


def test_clear_frees_all_memory(cache):
    weights = [parameter() for _ in range(3)]
    for weight in weights:
        use(cache, weight)
    assert cache.stats().entries == 3
    cache.clear()
    assert (cache.stats().entries, cache.stats().bytes) == (0, 0)


def test_threads_share_a_cache_while_weights_change_and_die():
    cache = polycast.WeightCache(max_bytes=6 * BYTES)
    weights = [parameter(1.0) for _ in range(8)]

    @torch.no_grad()
    def read(number):
        for turn in range(300):
            weight = weights[(number + turn) % 8]
            for used in (weight, weight.T, weight[:, :2]):
                out = use(cache, used).float()
                assert torch.all(out == out[0, 0])  # never half of one value and half of another
            use(cache, parameter())

    @torch.no_grad()
    def write():
        for turn in range(300):
            weights[turn % 8] = parameter(1.0 + turn % 3)
            cache.stats()
            if turn % 50 == 0:
                cache.clear()

    with ThreadPoolExecutor(5) as pool:
        for future in [*(pool.submit(read, number) for number in range(4)), pool.submit(write)]:
            future.result()
    for weight in weights:
        for used in (weight, weight[:, :2]):
            assert torch.equal(use(cache, used), torch.mm(X, used.detach().bfloat16()))


def test_new_data_at_the_address_of_the_old_is_seen(cache):
    weight = nn.Parameter(torch.zeros(64, 64), requires_grad=False)
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    for turn in range(20):
        weight.data = torch.empty(0)
        weight.data = torch.full((64, 64), float(turn))
        with torch.no_grad(), polycast.autocast("cpu", cache=cache):
            assert torch.equal(torch.mm(x, weight), torch.full((1, 64), 64.0 * turn, dtype=torch.bfloat16))


@pytest.mark.parametrize("change", [lambda data: data[:2], lambda data: data.t()], ids=["shape", "strides"])
def test_other_sizes_and_strides_on_the_same_memory_are_seen(any_cache, change):
    weight = nn.Parameter(torch.arange(16.0).view(4, 4), requires_grad=False)
    with polycast.autocast("cpu", cache=any_cache):
        for _ in range(2):
            expected = torch.mm(weight.detach().bfloat16(), X)
            for _ in range(2):
                assert torch.equal(torch.mm(weight, X), expected)
            weight.data = change(weight.data)


@pytest.mark.parametrize("use", ["cast", "view", "stats", "write"])
def test_weights_may_die_at_each_moment_of_a_use(use):
    def frozen(*shape):
        return nn.Parameter(torch.ones(shape), requires_grad=False)

    x, experts = torch.ones(1, 8), frozen(4, 8, 8)

    def product(cache, weight):
        with torch.no_grad(), polycast.autocast("cpu", cache=cache):
            return torch.mm(x, weight)

    def after(allocations):
        """Use a cache while the garbage collector runs after so many more allocations, and frees weights in it."""
        cache = polycast.WeightCache(max_bytes=8 * 128 if use == "cast" else None)
        product(cache, experts[0])
        product(cache, experts[1])
        weight = frozen(8, 8)
        gc.disable()
        gc.collect()  # all, so that tuples that are made next are allocated
        for _ in range(6):
            cycle = [frozen(8, 8)]
            cycle.append(cycle)
            product(cache, cycle[0])
        del cycle
        gc.set_threshold(gc.get_count()[0] + allocations, *thresholds[1:])
        gc.enable()
        if use == "cast":
            product(cache, weight)
        elif use == "view":
            product(cache, experts[2])
        elif use == "stats":
            cache.stats()
        else:
            experts.data.add_(0)

    thresholds = gc.get_threshold()
    try:
        for allocations in range(80):
            after(allocations)
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
