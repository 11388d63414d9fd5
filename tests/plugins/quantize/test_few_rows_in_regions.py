"""The CPU's own kernels for few rows in regions with recipe "fastest", where the profile says that they are fastest."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polycast
from polycast import Fastest, WeightCache, autocast
from polycast_plugins.fastest.measure import ways_of

from .matmul_kinds import FEW_ROWS, FewRows

pytestmark = [
    pytest.mark.skipif(not FEW_ROWS, reason=f"no kernels here: {FEW_ROWS.reason}"),
    pytest.mark.usefixtures("engine", "no_grad"),
]
FAST = (torch.bfloat16, torch.float16)
ROWS = (1, 2, 4, 5, 8)
BIAS = torch.randn(200)
SLOW = {"overhead": 1e-15, "cast": 1e-15, "bfloat16": 9.0, "float16": 9.0}
CALLS = {
    "linear": lambda x, w: F.linear(x, w.t(), BIAS),
    "mm": lambda x, w: torch.mm(x, w),
    "matmul": lambda x, w: torch.matmul(x[None], w),
    "addmm": lambda x, w: torch.addmm(BIAS, x, w, beta=0.5, alpha=2),
}


@pytest.fixture(params=["rows are dense", "columns are dense"])
def weight(request):
    """Return a weight (K, N) in one of the orders that it has in models: that of nn.Linear, and GPT-2's."""
    torch.manual_seed(0)
    if request.param == "rows are dense":
        return nn.Parameter(torch.randn(300, 200))
    return nn.Parameter(torch.randn(200, 300)).t()


@pytest.fixture
def by_kernel(profile_of):
    """Return the recipe for a machine where the kernel on the cached cast is the fastest."""
    return Fastest(profile_of(**SLOW, bfloat16_kernel=0.1, float16_kernel=0.1))


@pytest.fixture
def by_float32_kernel(profile_of):
    """Return the recipe for a machine where the kernel on the float32 weight is the fastest."""
    return Fastest(profile_of(**SLOW, float32_kernel=0.1))


def expected(call, x, weight, dtype=torch.bfloat16, of_weight=None):
    """Return what the kernel computes outside of regions, by the weight's cast to a dtype, by default the result's."""
    given = {"linear": (x, weight.t(), BIAS), "matmul": (x[None], weight), "addmm": (BIAS, x, weight, 0.5, 2)}
    return FewRows(None, of_weight).run(call, *given.get(call, (x, weight)), dtype=dtype)


@pytest.mark.parametrize("dtype", FAST, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_few_rows_are_computed_by_it(call, dtype, weight, by_kernel, recipe_counts, engine):
    cache, name = WeightCache(), str(dtype).removeprefix("torch.")
    inputs = [torch.randn(rows, 300) for rows in ROWS]
    with autocast("cpu", dtype, recipe=by_kernel, cache=cache):
        with recipe_counts() as counts:
            first = [CALLS[call](x, weight) for x in inputs]
        for _ in range(2):  # the native engine then knows the calls
            again = [CALLS[call](x, weight) for x in inputs]
    (record,) = counts.records()
    assert (record.op, record.recipe, record.calls) == (f"aten::{call}", f"fastest:{name} kernel", len(ROWS))
    assert cache.stats().entries == (engine == "native")
    for x, result, repeated in zip(inputs, first, again, strict=True):
        assert torch.equal(result, expected(call, x, weight, dtype))
        assert torch.equal(repeated, result)


@pytest.mark.parametrize("call", CALLS)
def test_few_rows_are_computed_by_it_from_the_float32_weight(call, weight, by_float32_kernel, recipe_counts):
    cache, x = WeightCache(), torch.randn(4, 300)
    with autocast("cpu", recipe=by_float32_kernel, cache=cache):
        with recipe_counts() as counts:
            first = CALLS[call](x, weight)
        again = [CALLS[call](x, weight) for _ in range(3)]
    assert {record.recipe for record in counts.records()} == {"fastest:float32 kernel"}
    assert cache.stats().entries == 0
    assert torch.equal(first, expected(call, x, weight, of_weight=torch.float32))
    assert all(torch.equal(result, first) for result in again)


def test_more_rows_are_computed_in_another_way(by_kernel, recipe_counts):
    layer = nn.Linear(300, 200)
    with autocast("cpu", recipe=by_kernel, cache=WeightCache()), recipe_counts() as counts:
        assert torch.equal(layer(torch.ones(9, 300)), F.linear(torch.ones(9, 300), *layer.parameters()).bfloat16())
    assert {record.recipe for record in counts.records()} == {"fastest:float32"}


def test_the_profile_of_the_cpu_has_it():
    names = [way.name for way in ways_of(polycast.plugin.get_backend("cpu"))[0]]
    assert {"bfloat16 kernel", "float16 kernel", "float32 kernel"} <= set(names)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("recipe", ["by_kernel", "by_float32_kernel"])
def test_a_row_has_the_same_bits_in_any_batch(call, recipe, weight, request):
    recipe, x = request.getfixturevalue(recipe), torch.randn(8, 300)
    with autocast("cpu", recipe=recipe, cache=WeightCache()):
        whole = CALLS[call](x, weight).reshape(8, 200)
        for first in range(8):
            for last in range(first + 1, 9):
                assert torch.equal(CALLS[call](x[first:last], weight).reshape(-1, 200), whole[first:last])
