"""The casts that a region of the native engine caches: those of reused weights, and a few on probation."""

import gc
import resource
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import polycast

from .cached_casts import X, count_casts, events, parameter, use
from .each_cache import frozen

pytestmark = pytest.mark.parametrize("engine", ["native"], indirect=True)


@pytest.fixture(autouse=True)
def _keeps_no_casts(engine):
    polycast.clear_autocast_cache()
    yield
    polycast.clear_autocast_cache()


KIB = 1024 if sys.platform == "darwin" else 1
"""The unit of ru_maxrss."""


def in_region(*weights):
    """Return a function that uses weights in a region, one after the other."""

    def run():
        with torch.no_grad(), polycast.autocast("cpu"):
            for weight in weights:
                torch.mm(X, weight)

    return run


def large():
    return nn.Parameter(torch.ones(4, 2**19), requires_grad=False)


def test_weights_that_are_used_once_share_the_memory_of_one_cast():
    found = events(in_region(large(), large(), large()))
    assert (found["aten::empty_strided"], found["aten::copy_"]) == (1, 3)


def test_small_weights_that_alternate_are_cast_once():
    assert count_casts(in_region(*2 * [frozen() for _ in range(4)])) == 4


def test_a_cast_that_an_op_has_resized_leaves_room_for_the_next_ones(define, registered):
    define("grow(Tensor x) -> Tensor", kernel=lambda cast: cast.resize_(100 * len(cast), 4).sum())
    registered("polycast_test::grow", polycast.CastPolicy.LOWER_PRECISION_FP)
    with torch.no_grad(), polycast.autocast("cpu"):
        torch.ops.polycast_test.grow(frozen())
    one, other = frozen(), frozen()
    assert count_casts(in_region(one, other, one)) == 2


def test_a_reused_weight_is_cached_and_in_the_next_region_from_its_first_use(in_thread):
    a, b = large(), large()
    run = in_region(a, b, a, b, a, b)
    assert in_thread(lambda: (count_casts(run), count_casts(run))) == (3, 2)


def test_a_weight_is_not_cached_after_a_region_that_used_it_once(in_thread):
    a, b = large(), large()
    once, again = in_region(a, b), in_region(a, b, a, b)

    def copies():
        again(), once()
        return count_casts(again)

    assert in_thread(copies) == 3


class Mark:
    """An object that lives as long as the node that it is hooked to."""

    def hook(self, *_):
        pass


@pytest.mark.parametrize("updates", [1, 50])
def test_casts_with_history_do_not_accumulate_over_updates_of_a_weight(updates):
    weight = parameter()
    with polycast.autocast("cpu"):
        for _ in range(updates):
            out = torch.mm(X, weight)
            mark = Mark()
            out.grad_fn.next_functions[1][0].register_hook(mark.hook)
            link = weakref.ref(mark)
            del out, mark
            with torch.no_grad():
                weight.add_(1)
        torch.mm(X, weight)
        assert link() is None


@pytest.mark.parametrize("kept", [False, True], ids=["recent", "kept"])
def test_a_cast_has_the_strides_of_the_weight(kept):
    weight = nn.Parameter(torch.randn(8, 4, 3, 3), requires_grad=False)
    x = torch.randn(1, 4, 5, 5).to(memory_format=torch.channels_last)

    def strides():
        with torch.no_grad(), polycast.autocast("cpu"):
            for _ in range(2 + kept):
                out = torch.conv2d(x, weight)
        return out.stride()

    strides()
    weight.data = weight.data.to(memory_format=torch.channels_last)
    assert strides() == torch.conv2d(x.bfloat16(), weight.detach().bfloat16()).stride()


def test_threads_share_cached_casts():
    weight, start = large(), threading.Barrier(4)

    def work():
        with torch.no_grad(), polycast.autocast("cpu"):
            torch.mm(X, small)
            start.wait()
            torch.mm(X, other), torch.mm(X, weight), torch.mm(X, other)
            start.wait()
            with lock:
                torch.mm(X, weight)
            start.wait()

    lock, small, other = threading.Lock(), frozen(), large()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: in_region(small)(), range(4)))
        copies = count_casts(lambda: list(pool.map(lambda _: work(), range(4))))
    # Each thread casts the small one, the large one at its first use, the other once or twice; then one casts for all.
    assert copies <= 4 * (1 + 1 + 2) + 1


@pytest.mark.parametrize("written", [False, True], ids=["", "written"])
def test_weights_whose_casts_threads_shared_can_be_swapped_after_their_regions(written):
    weight, other = parameter(), parameter()
    weight.grad = torch.ones(4, 4)
    optimizer = torch.optim.SGD([weight], fused=True)

    def use(_):
        with polycast.autocast("cpu"):
            for _ in range(3):
                torch.mm(weight, weight)
            if written:
                optimizer.step()  # its cast is found to be out of date as another is made
                torch.mm(other, other)

    use(None)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(use, range(4)))
    use(None)
    torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(4, 4)))  # refuses those that anything refers to weakly
    assert torch.equal(weight, torch.zeros(4, 4))


def test_clearing_for_all_threads_is_seen_by_a_thread_in_a_region():
    weight, ready, cleared = frozen(), threading.Event(), threading.Event()

    def work():
        with torch.no_grad(), polycast.autocast("cpu"):
            torch.mm(X, weight)
            ready.set()
            cleared.wait()
            return count_casts(lambda: torch.mm(X, weight))

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(work)
        ready.wait()
        polycast.clear_autocast_cache(all_threads=True)
        cleared.set()
        assert result.result() == 1


def test_clearing_while_dead_weights_are_swept_drops_all_casts(mark):
    with torch.no_grad(), polycast.autocast("cpu"):
        for _ in range(300):  # of the dead, fewer are kept
            weight = frozen()
            torch.mm(X, weight), torch.mm(X, weight)
            mark(weight, polycast.clear_autocast_cache)
        assert torch.mm(X, weight)[0, 0] == 4


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_the_cast_of_a_frozen_weight_from_a_file_is_cached(cache, mmap, tmp_path):
    torch.save([torch.ones(4, 4), torch.ones(4, 4)], tmp_path / "weights.pt")
    weight = nn.Parameter(torch.load(tmp_path / "weights.pt", mmap=mmap)[1], requires_grad=False)
    assert count_casts(in_region(weight, weight, weight)) == 1
    use(cache, weight), use(cache, weight)
    assert cache.stats().hits == 1


def test_memory_that_a_graph_holds_is_not_reused():
    weight = frozen(1.0)

    def forward():
        x = X.clone().requires_grad_()
        with polycast.autocast("cpu"):
            return x, torch.mm(x, weight)

    x, out = forward()
    with torch.no_grad():
        weight.mul_(3)
    other_x, other = forward()
    (out.sum() + other.sum()).backward()
    assert torch.equal(x.grad, 4 * X)
    assert torch.equal(other_x.grad, 12 * X)


@pytest.mark.slow
def test_memory_does_not_grow_over_ten_thousand_regions_and_dying_weights():
    def regions(count):
        for _ in range(count):
            weight = nn.Parameter(torch.ones(64, 64))
            x = torch.ones(1, 64)
            with polycast.autocast("cpu"):
                torch.mm(x, weight)
            with torch.no_grad(), polycast.autocast("cpu"):
                torch.mm(x, weight)
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = regions(2000)
    # 10,000 casts that were not given back would be 80 MB.
    assert regions(10_000) - before < 16 * 1024 * KIB
