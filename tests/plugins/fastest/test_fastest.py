"""The recipe "fastest": how each op is computed, and that the results are as exact as the fast dtype's."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polycast
from polycast import Fastest, WeightCache, autocast
from polycast.policy import recipe_settings
from polycast_plugins.fastest.choose_way import Conversions, Way, bucket, choose
from polycast_plugins.fastest.workloads import Workload

from .products import ATTENTIONS, PRODUCTS, made

pytestmark = pytest.mark.usefixtures("engine", "no_grad")
X = torch.randn(6, 32)


OPS = PRODUCTS | ATTENTIONS


@pytest.fixture(params=OPS)
def op(request):
    function, *shapes = OPS[request.param]
    return function, *made(shapes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_float32_rounds_the_result_of_a_float32_op(op, slow, dtype, given, recipe_counts):
    function, x, weight = op
    x = x.to(given)
    expected = function(x.float(), weight).to(dtype)
    with autocast("cpu", dtype, recipe=slow), recipe_counts() as counts:
        assert torch.equal(function(x, weight), expected)
    assert {record.recipe for record in counts.records()} == {"fastest:float32"}
    assert {record.declined for record in counts.records()} == {""}


def test_the_fast_dtype_has_torchs_bits(op, quick, recipe_counts):
    function, x, weight = op
    with torch.autocast("cpu"):
        expected = function(x, weight)
    with autocast("cpu", recipe=quick), recipe_counts() as counts:
        assert torch.equal(function(x, weight), expected)
    assert {record.recipe for record in counts.records()} == {"fastest:bfloat16"}


@pytest.fixture
def kernel(register_kernel):
    return register_kernel()


def test_a_backend_that_is_registered_in_place_of_another_uses_its_own_kernel(register_kernel, recipe_of):
    recipe, layer, kernels = recipe_of(bfloat16=9.0, bfloat16_kernel=0.2), nn.Linear(32, 64), []
    for _ in range(2):
        kernels.append(register_kernel())
        for _ in range(3):
            with autocast("cpu", recipe=recipe):
                layer(X[:1])
    assert [len(each.casts) for each in kernels] == [3, 3]


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_a_backends_kernel_gets_the_cached_cast(kernel, recipe_of, recipe_counts):
    recipe = recipe_of(bfloat16=9.0, bfloat16_kernel=0.2)
    cache, weight = WeightCache(), nn.Parameter(torch.randn(64, 32))
    with autocast("cpu", recipe=recipe, cache=cache), recipe_counts() as counts:
        one, other = F.linear(X[:1], weight), F.linear(X[:1], weight)
        of_view = F.linear(torch.ones(1, 64), weight.t())
        many = F.linear(X, weight)
    assert torch.equal(one, F.linear(X[:1].bfloat16(), weight.bfloat16()) + 1)
    assert torch.equal(one, other)
    assert torch.equal(of_view, F.linear(torch.ones(1, 64).bfloat16(), weight.t().bfloat16()) + 1)
    assert torch.equal(many, F.linear(X, weight).bfloat16())
    assert len({cast.data_ptr() for cast in kernel.casts}) == 1
    assert cache.stats().entries == 1
    calls = {record.recipe: record.calls for record in counts.records()}
    assert calls == {"fastest:bfloat16 kernel": 3, "fastest:float32": 1}


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_a_backends_kernel_gets_the_float32_weight_where_casts_cost_more(kernel, profile_of, recipe_counts):
    times = profile_of(overhead=1e-15, cast=1.0, bfloat16=9.0, bfloat16_kernel=0.2, float32_kernel=0.3)
    cache, weight = WeightCache(), nn.Parameter(torch.randn(64, 32))
    with autocast("cpu", recipe=Fastest(times)), recipe_counts() as counts:
        result = F.linear(X[:1], weight)
    assert {record.recipe for record in counts.records()} == {"fastest:float32 kernel"}
    assert torch.equal(result, (F.linear(X[:1], weight) + 1).bfloat16())
    with autocast("cpu", recipe=Fastest(times), cache=cache):
        F.linear(X[:1], weight)
    assert [cast.dtype for cast in kernel.casts] == [torch.float32, torch.bfloat16]
    assert cache.stats().entries == 1


def test_a_float32_weight_that_is_multiplied_as_it_is_may_change(profile_of):
    recipe = Fastest(profile_of(overhead=1e-15, cast=1.0, bfloat16=9.0, bfloat16_kernel=9.0, float32_kernel=0.1))
    weight = nn.Parameter(torch.randn(64, 32))
    with autocast("cpu", recipe=recipe, cache=WeightCache()):
        for _ in range(3):
            weight.data.normal_()
            for given in (X[:1], X[:1].bfloat16()):
                result = F.linear(given, weight)
                assert result.dtype is torch.bfloat16
                torch.testing.assert_close(result.double(), given.double() @ weight.double().t(), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("times", "size", "x", "cached", "way"),
    [
        ({"bfloat16": 0.3, "cast": 1e-9}, 1024, torch.randn(64, 1024), True, "bfloat16"),
        ({"bfloat16": 0.3, "cast": 1e-9}, 1024, torch.randn(64, 1024), False, "float32"),
        ({"bfloat16": 1.5}, 4, torch.randn(1, 4).bfloat16(), True, "bfloat16"),
    ],
    ids=["a cast in a cache", "a cast", "a small op"],
)
def test_the_time_of_a_call_and_of_the_cast_of_a_weight_count(profile_of, times, size, x, cached, way, recipe_counts):
    recipe, cache = Fastest(profile_of(**times)), WeightCache() if cached else None
    with autocast("cpu", recipe=recipe, cache=cache), recipe_counts() as counts:
        nn.Linear(size, size)(x)
    assert [record.recipe for record in counts.records()] == [f"fastest:{way}"]


def test_equal_buckets_give_equal_choices():
    assert [bucket(size) for size in (0, 1, 2, 3, 90, 91, 128, 181, 182)] == [0, 1, 2, 4, 64, 128, 128, 128, 256]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((torch.randn(2, 8), torch.randn(8, 8).bfloat16()), None),
        ((torch.randn(2, 8), nn.Parameter(torch.randn(8, 8).bfloat16())), "its weight is not float32"),
        ((torch.randn(2, 8).double(), nn.Parameter(torch.randn(8, 8).double())), "a tensor is float64"),
        ((torch.randn(0, 8), nn.Parameter(torch.randn(8, 8))), "the profile does not cover it"),
    ],
    ids=["an activation", "bfloat16 weight", "float64", "no rows"],
)
def test_what_it_does_not_choose_for_runs_as_without_it(slow, args, reason, recipe_counts):
    with autocast("cpu"):
        expected = F.linear(*args)
    with autocast("cpu", recipe=slow), recipe_counts() as counts:
        result = F.linear(*args)
        explained = polycast.explain("linear", *args, device_type="cpu")
    (record,) = counts.records()
    if reason is not None:
        assert torch.equal(result, expected)
        assert reason in record.declined
        assert reason in explained.declined
    else:
        assert record.declined == ""
        assert explained.declined is None
    assert result.dtype is expected.dtype


def test_ops_and_min_size_limit_it(profile_of, recipe_counts):
    profile = profile_of(bfloat16=3.0)
    with recipe_counts() as counts:
        with autocast("cpu", recipe=Fastest(profile, ops=["mm"])):
            nn.Linear(32, 32)(X)
            torch.mm(X, torch.randn(32, 32))
        with autocast("cpu", recipe=Fastest(profile, min_size=1025)):
            nn.Linear(32, 32)(X)
    assert [(record.op, record.declined[:10]) for record in counts.records()] == [
        ("aten::mm", ""),
        ("aten::linear", "the weight"),
    ]


def test_float32_caches_no_weight_and_uses_a_changed_one_at_once(slow):
    layer, cache = nn.Linear(32, 32), WeightCache()
    with autocast("cpu", recipe=slow, cache=cache):
        for change in (
            lambda: layer.weight.mul_(2),
            lambda: layer.weight.data.add_(1),
            lambda: setattr(layer.weight, "data", torch.randn(32, 32)),
        ):
            layer(X)
            change()
            assert torch.equal(layer(X), F.linear(X, layer.weight, layer.bias).bfloat16())
    assert cache.stats().entries == 0


def test_explain_shows_the_way_and_why(slow, quick, kernel, recipe_of):
    weight, bias = nn.Linear(32, 32).parameters()

    def explain(of_region, *args, **options):
        with autocast("cpu", recipe=of_region):
            return polycast.explain("linear", *args, device_type="cpu", **options)

    explained = explain(slow, X, weight, bias)
    assert (explained.recipe, explained.way, explained.declined) == ("fastest", "float32", None)
    assert "computes it in float32: float32 takes 0.1" in str(explained)
    explained = explain(slow, X.bfloat16(), weight, bias)
    assert [argument.is_cast for argument in explained.arguments] == [True, False, False]
    assert explain(slow).way == ""
    explained = explain(slow, X, weight, recipe=quick)
    assert (explained.way, [each.seen for each in explained.arguments]) == ("bfloat16", [torch.bfloat16] * 2)
    assert "no other way takes less than 0.92 of bfloat16's time (float32" in explained.reason
    assert explain(recipe_of(bfloat16=3.0, bfloat16_kernel=0.01), X[:4], weight, None).way == "bfloat16 kernel"


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine cannot be observed
def test_observe_has_the_share_of_each_way(profile_of):
    recipe = Fastest(profile_of(overhead=1e-15, bfloat16={"linear": 3.0, "other": 0.3}))
    layer, matrix = nn.Linear(64, 64), torch.randn(64, 64)
    with autocast("cpu", recipe=recipe), polycast.observe() as seen:
        torch.mm(layer(torch.randn(64, 64)), matrix)
    assert seen.recipe_share == 1.0
    assert "fastest:float32: 50%, fastest:bfloat16: 50% of the 1.05 MFLOPs in matmuls" in str(seen)


def test_a_weight_that_is_cast_for_one_row_alone_is_read_as_it_is(profile_of):
    profile = replace(profile_of(cast=1e-15, bfloat16=1.0, bfloat16_kernel=0.4), bandwidth=1e11)
    workload = Workload("linear", 1, 2**20, 2**10, 2**10)
    for elements, way in ((0, Way.KERNEL), (2**20, Way.FLOAT32), (2**25, Way.FLOAT32)):
        assert choose(profile, torch.bfloat16, workload, Conversions(0, 2**10, elements), (Way.KERNEL,)).way is way


@pytest.mark.parametrize("rate", [0.0, 1e9, 1e15], ids=str)
def test_a_weight_is_read_from_memory_in_the_narrower_dtype(profile_of, rate):
    profile = replace(profile_of(bfloat16=1.0, bfloat16_kernel=0.5, float32_kernel=0.4), bandwidth=rate)
    ways = (Way.KERNEL, Way.FLOAT32_KERNEL)
    for elements, way in ((2**16, Way.FLOAT32_KERNEL), (2**20, Way.KERNEL if rate == 1e9 else Way.FLOAT32_KERNEL)):
        workload = Workload("linear", 128, elements, 2**8, 2**8)
        assert choose(profile, torch.bfloat16, workload, Conversions(0, 0, 0), ways).way is way


def test_a_profile_that_becomes_known_is_used(profile_of, monkeypatch):
    profile, weight = profile_of(bfloat16=7.0, overhead=1e-15, cast=1e-15), nn.Parameter(torch.randn(32, 32))
    text = Fastest(profile).text
    monkeypatch.setattr(recipe_settings, "objects", {})

    def run(recipe):
        with autocast("cpu", recipe=recipe):
            return F.linear(X, weight)

    unknown = polycast.plugin.Recipe.of_text(text)
    assert torch.equal(run(unknown), run(recipe="none"))
    known, expected = Fastest(profile), F.linear(X, weight).bfloat16()
    assert all(torch.equal(run(each), expected) for each in (known, unknown))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("stride", [0, -1, (1, 1, 1)], ids=str)
def test_wrong_arguments_raise_torchs_error(slow, grad, stride):
    x, weight = torch.ones(1, 3, 8, 8, requires_grad=True), nn.Parameter(torch.ones(4, 3, 3, 3))
    with torch.set_grad_enabled(grad):
        with pytest.raises(RuntimeError) as expected, autocast("cpu"):
            F.conv2d(x, weight, stride=stride)
        with pytest.raises(RuntimeError) as found, autocast("cpu", recipe=slow):
            F.conv2d(x, weight, stride=stride)
    assert str(found.value) == str(expected.value)
