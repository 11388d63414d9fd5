"""Casts of weights: which a region caches, none for a backend with caches_casts = False, and what writes them."""

import gc
import re
import weakref

import pytest
import torch
from torch._dynamo.testing import AotEagerAndRecordGraphs

import polycast
from polycast.engine.kernels import autocast_key

from .cached_casts import X, casts_in_region, count_casts, parameter, use
from .wrapped import Wrapped

pytestmark = pytest.mark.usefixtures("engine")


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
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
    assert casts_in_region(weight, weight, cache_enabled=False) == 2


def test_other_inputs_than_weights_are_cast_at_every_use():
    plain, computed = torch.ones(4, 4), parameter() * 2
    assert casts_in_region(plain, computed, plain, computed) == 4


def test_a_weight_requires_grad_from_one_op_to_the_next():
    weight = parameter(requires_grad=False)
    with polycast.autocast("cpu"):
        for requires_grad in (False, True, False, True, True, False):
            weight.requires_grad_(requires_grad)
            assert torch.mm(X, weight).requires_grad == requires_grad
        weight.requires_grad_(True)
        torch.mm(X, weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 4), 4.0))


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_casts_to_two_dtypes_live_side_by_side():
    weight = parameter()

    def run():
        with polycast.autocast("cpu", torch.bfloat16):
            assert torch.mm(X, weight).dtype is torch.bfloat16
            with polycast.autocast("cpu", torch.float16):
                assert torch.mm(X.half(), weight).dtype is torch.float16
            assert torch.mm(X, weight).dtype is torch.bfloat16

    assert count_casts(run) == 3  # one is of X


def test_a_weight_made_in_inference_mode_is_cast():
    with torch.inference_mode(), polycast.autocast("cpu"):
        assert torch.mm(X, parameter()).dtype is torch.bfloat16


def test_casts_of_tensors_that_torch_marks_as_cached_are_not_kept(weight, cache):
    """CUDA graph trees mark tensors whose values change while the tensors stay."""

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

    class Sees(Wrapped):
        @classmethod
        def __torch_dispatch__(cls, function, *given):
            seen.append(function)
            return super().__torch_dispatch__(function, *given)

    weight = Sees(torch.ones(4, 4)).requires_grad_()
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
    assert casts_in_region(weight, weight, dtype=torch.bfloat16) == 2


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


def test_weights_can_be_swapped_once_their_casts_are_cleared(cache, no_grad):
    weights = [parameter(1.0), parameter(2.0)]
    for each in (None, cache):
        for weight in weights:
            use(each, weight)
    polycast.clear_autocast_cache()
    cache.clear()
    torch.utils.swap_tensors(*weights)
    assert use(cache, weights[0])[0, 0] == 8


def test_a_weight_held_only_by_its_cast_is_freed_with_the_region():
    model = torch.nn.Linear(2, 2)
    alive = weakref.ref(model.weight)
    with polycast.autocast("cpu"):
        model(torch.ones(1, 2))  # in grad mode: the cast has a history, which holds the weight
        del model
    assert alive() is None


def cast_used(weight):
    """Return the cast of a weight that an op saved for its backward."""
    x = torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)
    return torch.mm(x, weight).grad_fn._saved_mat2


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("region", [polycast.autocast, torch.autocast])
@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_two_uses_of_a_weight_share_a_cast_only_if_casts_are_cached(other_cpu, caches, region):
    other_cpu(caches_casts=caches)
    polycast.install("cpu")
    weight = torch.nn.Parameter(torch.ones(64, 64))
    with region("cpu"):
        first, second = cast_used(weight), cast_used(weight)
    assert (first.data_ptr() == second.data_ptr()) is caches


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_a_weight_cache_has_casts_only_if_casts_are_cached(other_cpu, cache, caches):
    other_cpu(caches_casts=caches)
    weight = parameter()
    for _ in range(2):
        use(cache, weight)
    assert cache.stats().entries == int(caches)


@pytest.mark.parametrize("caches", [True, False])
def test_compiled_code_has_an_operator_for_casts_only_if_casts_are_cached(other_cpu, cache, caches):
    other_cpu(caches_casts=caches)
    weight, recorder = torch.nn.Parameter(torch.ones(64, 64)), AotEagerAndRecordGraphs()
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x @ weight, backend=recorder)
    with torch.no_grad(), polycast.autocast("cpu", cache=cache):
        assert compiled(torch.ones(2, 64)).dtype is torch.bfloat16
    assert ("cached_cast" in str(recorder.fw_graphs[0].graph)) is caches


def test_each_device_has_a_kernel_at_its_key_and_at_its_autograd_key(subtests):
    """No tensor with a gradient can be made on an absent device, so the dispatch table is read."""
    for device in ["cpu", "cuda", "maia", "mps", "mtia", "xpu"]:
        with subtests.test(device=device):
            polycast.uninstall()
            polycast.install(device)
            table = torch._C._dispatch_dump_table("polycast::cached_cast")
            key = autocast_key(device).removeprefix("Autocast")
            assert re.search(rf"^{key}: .*\[(default backend )?kernel\]$", table, re.MULTILINE)
            assert re.search(rf"^Autograd{key}: .*\[(autograd )?kernel\]$", table, re.MULTILINE)


def test_it_has_the_history_of_a_cast_without_installed_kernels():
    weight = torch.ones(2, 2, requires_grad=True)
    cast = torch.ops.polycast.cached_cast(weight, torch.bfloat16)
    assert cast.dtype is torch.bfloat16
    cast.sum().backward()
    assert torch.equal(weight.grad, torch.ones(2, 2))


@pytest.fixture
def region(engine, any_cache):
    """Return a region in which an op returns the cast of its input."""
    return polycast.autocast("cpu", cache=any_cache, policy={"aten::alias": "lower_precision_fp"})


@pytest.mark.parametrize("take", [lambda weight: weight, torch.t], ids=["weight", "view"])
def test_a_cast_that_was_written_is_not_used_again(region, weight, take):
    with region:
        for _ in range(3):
            with torch.no_grad():
                torch.ops.aten.alias(take(weight)).zero_()
            assert torch.mm(X, take(weight))[0, 0] == 4


def test_a_cast_that_was_written_through_the_one_in_the_graph_is_not_used_again(region):
    weight = parameter()
    with region:
        for _ in range(3):
            cast = torch.ops.aten.alias(weight)
            assert cast.requires_grad
            cast.mul_(0)
            assert torch.mm(X, weight)[0, 0] == 4
            with torch.no_grad():
                assert torch.mm(X, weight)[0, 0] == 4


def test_a_cast_that_was_written_is_not_used_by_other_threads(region, in_thread):
    weight = parameter()

    def product():
        with region:
            torch.mm(X, weight)
            return torch.mm(X, weight)[0, 0].item()

    with region:
        torch.mm(X, weight)
        assert in_thread(product) == 4
        torch.ops.aten.alias(weight).mul_(0)
        assert in_thread(product) == 4


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_backward_refuses_a_cast_that_was_written_since(region):
    weight = parameter()
    with region:
        out = torch.mm(X.clone().requires_grad_(), weight)
        with torch.no_grad():
            torch.ops.aten.alias(weight).zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
