"""The casts of weights that a region caches."""

import gc
import weakref

import pytest
import torch

import polycast

from .cached_casts import X, count_casts, parameter

pytestmark = pytest.mark.usefixtures("engine")


def test_a_weight_is_cast_once_in_a_region(weight):
    def run():
        with polycast.autocast("cpu"):
            torch.mm(X, weight)
            with polycast.autocast("cpu"):
                torch.mm(X, weight)
            torch.mm(X, weight)

    assert count_casts(run) == 1
    assert count_casts(run) == 1


def test_without_the_cache_a_weight_is_cast_at_every_use(weight):
    def run():
        with polycast.autocast("cpu", cache_enabled=False):
            torch.mm(X, weight)
            torch.mm(X, weight)

    assert count_casts(run) == 2


def test_other_inputs_than_weights_are_cast_at_every_use():
    plain = torch.ones(4, 4)
    computed = parameter() * 2

    def run():
        with polycast.autocast("cpu"):
            for _ in range(2):
                torch.mm(X, plain)
                torch.mm(X, computed)

    assert count_casts(run) == 4


@pytest.mark.parametrize("update", ["in_place", "data", "set_data"])
def test_an_update_inside_the_region_is_seen(weight, update):
    with polycast.autocast("cpu"), torch.no_grad():
        before = torch.mm(X, weight)
        if update == "in_place":
            weight.mul_(2)
        elif update == "data":
            weight.data = torch.full((4, 4), 2.0)
        else:
            torch.Tensor.set_(weight, torch.full((4, 4), 2.0))
        assert torch.equal(torch.mm(X, weight), 2 * before)


def test_a_weight_with_new_strides_on_its_memory_is_cast_again(weight):
    with polycast.autocast("cpu"), torch.no_grad():
        weight.copy_(torch.arange(16.0).view(4, 4))
        before = [torch.mm(X, weight) for _ in range(2)][-1]
        weight.data = weight.data.t()
        assert torch.equal(torch.mm(X, weight), torch.mm(X, weight.detach().bfloat16()))
        assert not torch.equal(torch.mm(X, weight), before)


def test_a_weight_requires_grad_from_one_op_to_the_next():
    weight = parameter(requires_grad=False)
    with polycast.autocast("cpu"):
        for requires_grad in (False, True, False, True, True, False):
            weight.requires_grad_(requires_grad)
            assert torch.mm(X, weight).requires_grad == requires_grad
        weight.requires_grad_(True)
        torch.mm(X, weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 4), 4.0))


def test_casts_to_two_dtypes_live_side_by_side():
    weight = parameter()

    def run():
        with polycast.autocast("cpu", torch.bfloat16):
            assert torch.mm(X, weight).dtype is torch.bfloat16
            with polycast.autocast("cpu", torch.float16):
                assert torch.mm(X.half(), weight).dtype is torch.float16
            assert torch.mm(X, weight).dtype is torch.bfloat16

    half = count_casts(lambda: X.half())
    assert count_casts(run) == 2 + half


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_a_cast_made_without_grad_does_not_cost_the_gradient(first):
    weight = parameter()
    with polycast.autocast("cpu"):
        with first():
            torch.mm(X, weight)
        torch.mm(X, weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 4), 4.0))


def test_a_cast_made_in_inference_mode_serves_no_grad_mode_of_a_trained_input():
    frozen = parameter(requires_grad=False)
    x = X.clone().requires_grad_()
    with polycast.autocast("cpu"):
        with torch.inference_mode():
            torch.mm(x, frozen)
        torch.mm(x, frozen).sum().backward()
    assert x.grad is not None


def test_a_weight_made_in_inference_mode_is_cast():
    with torch.inference_mode(), polycast.autocast("cpu"):
        assert torch.mm(X, parameter()).dtype is torch.bfloat16


def test_leaving_another_threads_region_keeps_this_threads_casts(in_thread):
    weight = parameter()

    def other():
        with polycast.autocast("cpu"):
            torch.mm(X, weight)

    def run():
        with polycast.autocast("cpu"):
            torch.mm(X, weight)
            in_thread(other)
            torch.mm(X, weight)

    assert count_casts(run) - count_casts(lambda: in_thread(other)) == 1


def test_clearing_the_cache_casts_again():
    weight = parameter()

    def run():
        with polycast.autocast("cpu"):
            torch.mm(X, weight)
            polycast.clear_autocast_cache()
            torch.mm(X, weight)

    assert count_casts(run) == 2


def test_casts_of_tensors_that_torch_marks_as_cached_are_not_kept(weight):
    """CUDA graph trees mark tensors whose values change while the tensors stay."""
    cache = polycast.WeightCache()

    def run():
        for _ in range(2):
            with polycast.autocast("cpu"):
                torch.mm(X, weight)
                torch.mm(X, weight.t())
            with polycast.autocast("cpu", cache=cache):
                torch.mm(X, weight)

    torch._C._set_cached_tensors_enabled(True)
    try:
        torch._C._add_cached_tensor(weight)
        assert count_casts(run) == 6
    finally:
        torch._C._remove_cached_tensor(weight)
        torch._C._set_cached_tensors_enabled(False)
    assert (cache.stats().hits, cache.stats().entries) == (0, 0)


def test_the_subclass_of_a_weight_sees_its_casts():
    seen = []

    class Tagged(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            plain = torch.utils._pytree.tree_map_only(cls, lambda t: t.plain, args)
            return func(*plain, **(kwargs or {}))

        @staticmethod
        def __new__(cls, plain):
            self = torch.Tensor._make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype)
            self.plain = plain
            return self

    weight = Tagged(torch.ones(4, 4)).requires_grad_()
    with polycast.autocast("cpu"):
        torch.mm(X, weight)
        torch.mm(X, weight)
    assert seen.count(torch.ops.aten._to_copy.default) == 2


def test_nothing_is_cached_under_functorch_or_while_tracing():
    weight = parameter()
    with polycast.autocast("cpu"):
        torch.func.grad(lambda w: torch.mm(X, w).float().sum())(weight.detach())
        torch.func.vmap(lambda x: torch.mm(x, weight))(X[None])
        torch.jit.trace(lambda x, w: torch.mm(x, w), (X, weight.detach()), check_trace=False)
        assert count_casts(lambda: torch.mm(X, weight)) == 1


def test_nothing_is_cached_while_a_graph_is_captured(hand_made):
    hand_made("cpu", is_capturing=lambda: True)
    weight = parameter()

    def run():
        with polycast.autocast("cpu", torch.bfloat16):
            torch.mm(X, weight)
            torch.mm(X, weight)

    assert count_casts(run) == 2


@pytest.mark.slow
def test_a_cast_made_without_history_holds_no_weight():
    weight = parameter()
    dead = weakref.ref(weight)
    with polycast.autocast("cpu"):
        with torch.no_grad():
            torch.mm(X, weight)
        del weight
        gc.collect()
        assert dead() is None


def test_weights_can_be_swapped_once_their_casts_are_cleared():
    cache, weights = polycast.WeightCache(), [torch.nn.Parameter(torch.full((2, 2), value)) for value in (1.0, 2.0)]
    for settings in ({}, {"cache": cache}):
        for weight in weights:
            with torch.no_grad(), polycast.autocast("cpu", **settings):
                torch.mm(torch.ones(2, 2), weight)
    polycast.clear_autocast_cache()
    cache.clear()
    torch.utils.swap_tensors(*weights)
    with torch.no_grad(), polycast.autocast("cpu", cache=cache):
        assert torch.mm(torch.ones(2, 2), weights[0])[0, 0] == 4


def test_a_weight_held_only_by_its_cast_is_freed_with_the_region():
    model = torch.nn.Linear(2, 2)
    alive = weakref.ref(model.weight)
    with polycast.autocast("cpu"):
        model(torch.ones(1, 2))  # in grad mode: the cast has a history, which holds the weight
        del model
    assert alive() is None
