"""Recipes on views of weights, such as ``w.T``, ``w[:4]`` and an expert ``w[i]``."""

import gc

import pytest
import torch
from tests.engines import NATIVE
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.functional import linear

import polycast
from polycast import Int8, WeightCache, autocast

from .int8_linears import X, expected, run

pytestmark = [*NATIVE, pytest.mark.usefixtures("no_grad")]


def new_weight(*shape, frozen=False):
    generator = torch.Generator().manual_seed(len(shape))
    return nn.Parameter(torch.randn(*(shape or (8, 8)), generator=generator), requires_grad=not frozen)


PRODUCTS = {
    "matmul": ("aten::matmul", lambda w: X @ w.T, lambda w: w),
    "mm": ("aten::mm", lambda w: torch.mm(X, w.t()), lambda w: w),
    "rows": ("aten::linear", lambda w: linear(X, w[:4]), lambda w: w[:4]),
    "columns": ("aten::linear", lambda w: linear(X[:, :4], w[:, 4:]), None),
    "chunk": ("aten::linear", lambda w: linear(X, w.chunk(2)[1]), lambda w: w[4:]),
    "view of a view": ("aten::mm", lambda w: torch.mm(X, w.T[:, :4].T.T), lambda w: w[:4]),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_view_is_prepacked_once(kernels, name, mode, frozen, cached):
    op, product, rows = PRODUCTS[name]
    w = new_weight(frozen=frozen)
    for _ in range(3):
        with mode():
            result = run(product, w, **cached)
        assert result.dtype is torch.bfloat16
        if rows is not None:
            assert torch.equal(result, expected(rows(w)))
    assert (kernels[op].prepared, kernels[op].ran) == (1, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_views_of_16_bit_weights_are_prepacked(kernels, dtype):
    w = nn.Parameter(new_weight().to(dtype))
    for _ in range(2):
        run(lambda: X.to(dtype) @ w.T)
    assert (kernels["aten::matmul"].prepared, kernels["aten::matmul"].ran) == (1, 2)


def test_experts_are_prepacked_one_by_one(kernels):
    experts, cache = new_weight(4, 8, 8), WeightCache()
    for _ in range(2):
        for index in (2, 0, 3, 1, 2):
            assert torch.equal(run(linear, X, experts[index], cache=cache), expected(experts[index]))
    assert (kernels["aten::linear"].prepared, kernels["aten::linear"].ran) == (4, 10)
    assert cache.stats().packings == 4
    assert cache.stats().packed_bytes == 4 * (64 + 32)


def test_a_weight_and_a_part_that_begins_where_it_does_are_told_apart(kernels):
    w = new_weight()
    for take in (lambda w: w, lambda w: w[:4], torch.t, lambda w: w[:2]) * 2:
        assert torch.equal(run(linear, X, take(w)), expected(take(w)))
    assert kernels["aten::linear"].prepared == 4


WRITES = {
    "base": lambda w, view: w.mul_(2),
    "view": lambda w, view: view.mul_(2),
    "sibling": lambda w, view: w[:1].zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("take", [lambda w: w.view(8, 8), lambda w: w[:4]], ids=["all", "part"])
def test_writes_are_seen(kernels, take, write):
    w = new_weight()
    view = take(w)
    before = run(linear, X, view)
    write(w, view)
    assert torch.equal(run(linear, X, view), expected(view))
    assert not torch.equal(run(linear, X, view), before)


def test_new_memory_of_the_weight_is_seen(kernels):
    w = new_weight()
    before = run(linear, X, w[:4])
    w.data = new_weight().detach().flip(0)
    assert torch.equal(run(linear, X, w[:4]), expected(w[:4]))
    assert not torch.equal(run(linear, X, w[:4]), before)


def test_prepacked_views_are_freed_with_the_weight(kernels):
    w, cache = new_weight(), WeightCache()
    run(linear, X, w[:4], cache=cache)
    run(linear, X, w.T, cache=cache)
    assert cache.stats().packings == 2
    del w
    gc.collect()
    assert (cache.stats().packings, cache.stats().packed_bytes) == (0, 0)


def test_ever_new_slices_fall_back_to_the_fast_dtype_eventually(kernels, recipe_counts):
    w, cache = new_weight(32, 8), WeightCache()
    with recipe_counts() as counts:
        for length in range(2, 31):
            run(linear, X, w[:length], cache=cache)
    assert cache.stats().packed_bytes <= w.nbytes
    prepared = kernels["aten::linear"].prepared
    for length in (29, 30):  # nothing is packed that cannot be kept
        run(linear, X, w[:length], cache=cache)
    assert kernels["aten::linear"].prepared == prepared
    reasons = {record.declined for record in counts.records()}
    assert reasons == {"", "the prepacked views of its weight take as much memory as the weight"}


def test_verify_finds_an_unseen_write(kernels, double_unseen):
    w, cache = new_weight(), WeightCache(verify=True)
    for _ in range(2):
        run(linear, X, w[:4], cache=cache)
    double_unseen(w)
    with pytest.raises(polycast.errors.StaleWeightError):
        run(linear, X, w[:4], cache=cache)


def test_min_size_applies_to_the_view(kernels):
    w = new_weight()
    for size, ran in ((33, 0), (32, 1)):
        run(linear, X, w[:4], recipe=Int8(min_size=size))
        assert kernels["aten::linear"].ran == ran


OTHERS = {
    "detached": torch.Tensor.detach,
    "another dtype": lambda w: w.view(torch.int32).view(torch.float32),
    "negative": torch._neg_view,
    "computed": lambda w: w * 1,
    "view of computed": lambda w: (w * 1).T,
    "more elements than the weight": lambda w: w[0].expand(16, 8),
}


@pytest.mark.parametrize("take", OTHERS.values(), ids=OTHERS)
def test_other_tensors_than_plain_views_run_in_the_fast_dtype(kernels, recipe_counts, take):
    with recipe_counts() as counts:
        run(linear, X, take(new_weight()))
    assert kernels["aten::linear"].ran == 0
    assert [record.declined for record in counts.records()] == [
        "its weight is not a cacheable parameter or a plain view of one (it is a subclass, or the result of an op)"
    ]


@pytest.mark.parametrize("take", [lambda w: w.T, lambda w: w[:4].T], ids=["all", "part"])
def test_explain_op_agrees_on_views_and_fake_views(kernels, take):
    def reason_of(x, weight):
        with autocast("cpu"):
            return polycast.plugin.explain_op("mm", "cpu", (x, weight), recipe=Int8(min_size=1)).declined

    w = new_weight()
    assert reason_of(X, take(w)) is None
    assert "not a cacheable parameter" in reason_of(X, take(w * 1))
    with FakeTensorMode() as mode:
        assert reason_of(mode.from_tensor(X), take(mode.from_tensor(w))) is None


def test_a_prepacked_view_that_does_not_fit_beside_others_is_made_once(kernels):
    w, cache = new_weight(32, 8), WeightCache()
    run(linear, X, w[:30], cache=cache)
    run(linear, X, w[1:31], cache=cache)
    kept = cache.stats().packed_bytes
    assert kept + 26 * 8 <= w.nbytes < kept + 26 * 8 + 26 * 4  # there is room for its elements, and not for its scales
    for _ in range(3):
        run(linear, X, w[:26], cache=cache)
    assert kernels["aten::linear"].prepared <= 3
    w.mul_(2)  # what was kept is of no use any more
    for _ in range(3):
        assert torch.equal(run(linear, X, w[:26], cache=cache), expected(w[:26]))
    assert kernels["aten::linear"].prepared <= 4
