"""Prepacked weights of compiled code: of views of weights, and from a saved cache."""

import pytest
import torch
from tests.core.compilers.test_cached_casts import counts, inputs, mlp
from tests.core.compilers.test_views_of_weights import SIZE, X, new_weight
from tests.engines import NATIVE
from torch import nn
from torch.nn.functional import linear

from polycast import Int8, WeightCache, autocast
from polycast.engine.recipes import operators
from polycast_plugins.quantize.kernel_plan import KernelPlan

pytestmark = NATIVE
BIAS = torch.randn(SIZE)
PRODUCTS = {
    "whole": ("aten::linear", lambda w, x: linear(x, w, BIAS)),
    "T": ("aten::matmul", lambda w, x: x @ w.T),
    "mm": ("aten::mm", lambda w, x: torch.mm(x, w.t())),
    "rows": ("aten::linear", lambda w, x: linear(x, w[:32])),
    "chunk": ("aten::linear", lambda w, x: linear(x, w.chunk(2)[1])),
    "view of a view": ("aten::linear", lambda w, x: linear(x[:, :32], w.T[:32].T)),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_recipes_compute_by_the_prepacked_weights_of_eager_code(backend, name, dynamic, int8_kernels):
    op, product = PRODUCTS[name]
    w = new_weight()
    call = torch.compile(lambda x: product(w, x), backend=backend, fullgraph=True, dynamic=dynamic)
    with torch.no_grad(), autocast("cpu", recipe=Int8(min_size=1)):
        for rows in (2, 5):
            x = torch.randn(rows, SIZE)
            call(x)
            assert torch.equal(call(x), product(w, x))
        prepared, ran = int8_kernels[op].prepared, int8_kernels[op].ran
        w.mul_(2)
        for _ in range(2):
            assert torch.equal(call(x), product(w, x))
    assert (int8_kernels[op].prepared, int8_kernels[op].ran) == (prepared + 1, ran + 4)


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_code_needs_no_python_for_calls_like_earlier_ones(kernel, monkeypatch, grad):
    layer, x = nn.Linear(64, 32).requires_grad_(False), torch.randn(2, SIZE)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)

    def fail(*_):
        raise AssertionError("Python is asked again")

    with torch.set_grad_enabled(grad), autocast("cpu", recipe=Int8(min_size=1)):
        expected = layer(x)
        assert torch.equal(compiled(x), expected)
        with monkeypatch.context() as patch:
            patch.setattr(operators, "_run_in_compiled", fail)
            patch.setattr(KernelPlan, "perform", fail)
            patch.setattr(KernelPlan, "compute", fail)
            assert torch.equal(compiled(x), expected)


def test_experts_are_packed_one_by_one_in_a_region_in_the_code(int8_kernels, cache):
    experts, recipe = new_weight(4, SIZE, SIZE), Int8(min_size=1)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x):
        with autocast("cpu", recipe=recipe, cache=cache):
            return sum(linear(x, experts[index]) for index in range(4))

    with torch.no_grad():
        for _ in range(3):
            function(X)
    kernel = int8_kernels["aten::linear"]
    assert (kernel.prepared, cache.stats().packings) == (4, 4)
    assert kernel.ran >= 8


def test_a_slice_of_a_length_that_the_code_is_given_runs_in_the_fast_dtype(int8_kernels):
    w = new_weight()
    call = torch.compile(lambda x, n: linear(x, w[:n]), backend="aot_eager", dynamic=True)
    with torch.no_grad(), autocast("cpu", recipe=Int8(min_size=1)):
        for n in (10, 20):
            assert torch.equal(call(X, n), linear(X.bfloat16(), w[:n].bfloat16()))
    assert int8_kernels["aten::linear"].ran == 0


def test_the_first_call_of_compiled_code_uses_a_loaded_cache(backend, cache, in_region, tmp_path, int8_kernels):
    """The compiler reads the storages and .data of weights, and writes none; what others write is seen."""
    model = mlp()
    with torch.no_grad():
        expected = in_region(model, inputs(), cache=cache)
        in_region(model, inputs(), cache=cache, recipe="int8")
        cache.save(tmp_path / "saved", model)
        loaded = WeightCache.load(tmp_path / "saved", model)
        made = loaded.stats()
        y = in_region(torch.compile(model, backend=backend, fullgraph=True), inputs(), cache=loaded)
        now = loaded.stats()
        assert (now.entries, now.packings, *counts(loaded)) == (made.entries, made.packings, 0, 2)
        model[0].weight.data.zero_()
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)
    assert loaded.stats().entries < made.entries
