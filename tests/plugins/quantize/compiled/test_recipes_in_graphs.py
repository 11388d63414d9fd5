"""Recipes in compiled code."""

import pytest
import torch
from tests.plugins.models import Defined
from tests.plugins.modes import Seen
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import polycast
from polycast import Int8, WeightCache, autocast
from polycast.plugin import Availability

RECIPE = Int8(min_size=1)
X = torch.randn(3, 8)
pytestmark = pytest.mark.usefixtures("engine", "no_grad")


@pytest.fixture
def linear(int8_kernels):
    return int8_kernels["aten::linear"]


@pytest.fixture
def model(linear):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_compiled_code_computes_by_the_recipe_of_the_region_around(model, linear, backend, dynamic):
    compiled = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)
    with autocast("cpu", recipe=RECIPE):
        expected = model(X)
        for rows in (3, 5):
            x = torch.randn(rows, 8)
            assert torch.equal(compiled(x), model(x))
        assert compiled(X).dtype is expected.dtype is torch.bfloat16
        packed = linear.prepared  # the first call of new code gives out the weights' memory, so they are packed again
        compiled(X), model(X)
    assert (linear.prepared, linear.ran) == (packed, 2 * 8)


def test_refresh_reaches_compiled_code(model, linear):
    backend, compiled = polycast.plugin.get_backend("cpu"), torch.compile(model, backend="eager", fullgraph=True)
    with autocast("cpu", recipe=RECIPE):
        for available, ran in ((True, 2), (False, 2), (True, 4)):
            vars(backend).update(recipe_availability=lambda recipe, available=available: Availability(available))
            polycast.plugin.refresh("cpu")
            compiled(X)
            assert linear.ran == ran


class OfSize(Int8):
    """A recipe whose constructor takes other arguments."""

    kind = "int8-of-size"

    def __init__(self, size):
        super().__init__("row", min_size=size)


MADE = {
    "one outside": lambda: RECIPE,
    "a text": lambda: "int8",
    "Int8()": lambda: polycast.Int8(),
    "Int8(scales)": lambda: polycast.Int8(scales="row", min_size=1),
    "Int8(ops)": lambda: Int8("row", ["linear", "aten::mm"], 1),
    "NoRecipe()": lambda: polycast.NoRecipe(),
}
if not torch.__version__.startswith("2.11."):  # whose Dynamo does not trace a constructor of a subclass's own
    MADE["a subclass"] = lambda: OfSize(1)


@pytest.fixture
def large():
    return nn.Linear(256, 256)


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_recipe_may_be_made_in_the_code(large, linear, made):
    def function(x):
        with autocast("cpu", recipe=made()):
            return large(x)

    x = torch.randn(2, 256)
    expected, ran = function(x), linear.ran
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(x), expected)
    assert linear.ran == 3 * ran


@pytest.mark.parametrize(
    ("made", "kind"), [(polycast.Int8, "int8"), (polycast.Float8, "float8")], ids=["Int8", "Float8"]
)
def test_a_recipe_that_is_made_in_the_code_has_its_arguments(made, kind):
    @torch.compile(backend="eager", fullgraph=True)
    def function(x):
        recipe = made(scales="tensor", ops=("mm",))
        return x + recipe.min_size, recipe.text, recipe.ops, recipe.short

    sum_, text, ops, short = function(X)
    expected = made("tensor", ("mm",))
    assert torch.equal(sum_, X + expected.min_size)
    assert (text, ops, short) == (expected.text, ("mm",), f"{kind}:tensor")


def by_default(model, x, recipe=RECIPE):
    with autocast("cpu", recipe=recipe):
        return model(x)


def test_code_is_not_used_with_another_recipe_as_its_argument(model, linear):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(by_default, backend=counter, fullgraph=True)
    for _ in range(2):
        for given, computed in (((), 2), ((Int8(min_size=100),), 1), ((polycast.NoRecipe(),), 0)):
            before = linear.ran
            result = compiled(model, X, *given)
            assert linear.ran - before == computed
            assert torch.equal(result, by_default(model, X, *given))
    assert counter.frame_count == 3


def test_a_region_around_compiled_code_may_make_its_recipe_each_time(model, linear):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        with polycast.autocast("cpu", recipe=polycast.Int8(min_size=1)):
            assert torch.equal(compiled(X), model(X))
    assert counter.frame_count == 1


def test_code_that_makes_recipes_is_one_graph_without_fullgraph(large, linear):
    def function(x):
        with polycast.autocast("cpu", recipe=polycast.Int8(ops=["linear"])):
            inside = large(x)
        with polycast.autocast("cpu", recipe=polycast.NoRecipe()):
            return inside, large(x)

    explained = torch._dynamo.explain(function)(torch.randn(2, 256))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0), explained.break_reasons


def test_a_recipe_that_is_made_in_the_code_outlives_a_graph_break(model, linear):
    @torch.compile(backend="aot_eager")
    def function(x):
        recipe = Int8(min_size=1)
        torch._dynamo.graph_break()
        with autocast("cpu", recipe=recipe):
            return model(x), recipe

    result, recipe = function(X)
    assert recipe == Int8(min_size=1)
    assert torch.equal(result, by_default(model, X))


@pytest.mark.slow
def test_code_is_not_used_under_another_recipe(model, linear):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    settings = [
        {},
        {"recipe": RECIPE},
        {"recipe": Int8(min_size=100)},
        {"recipe": RECIPE, "policy": {"linear": "lower_precision_fp"}},
    ]
    for _ in range(2):
        for each, computed in zip(settings, (0, 2, 1, 0), strict=True):
            before = linear.ran
            with autocast("cpu", **each):
                result = compiled(X)
                assert linear.ran - before == computed
                assert torch.equal(result, model(X))
    assert counter.frame_count == len(settings)


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_an_update_is_seen_and_caches_are_found_at_run_time(model, linear):
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    caches = [WeightCache(), WeightCache(verify=True)]
    for cache in (*caches, *caches):
        with autocast("cpu", recipe=RECIPE, cache=cache):
            assert torch.equal(compiled(X), model(X))
    assert [cache.stats().packings for cache in caches] == [2, 2]
    model[0].weight.mul_(3)
    with autocast("cpu", recipe=RECIPE, cache=caches[0]):
        assert torch.equal(compiled(X), model(X))
    assert counter.frame_count == 1


def test_a_declined_op_compiles_as_without_a_recipe(linear):
    odd = nn.Linear(7, 4)
    compiled = torch.compile(odd, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 7)
    with autocast("cpu", recipe=RECIPE):
        assert torch.equal(compiled(x), odd(x))
    assert linear.ran == 0


def test_training_compiles_as_without_a_recipe(model, linear):
    with torch.enable_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with autocast("cpu", recipe=RECIPE):
            compiled(X).sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        with autocast("cpu"):
            model(X).sum().backward()
    assert linear.ran == 0
    assert all(torch.equal(parameter.grad, each) for parameter, each in zip(model.parameters(), gradients, strict=True))


def test_what_compiled_code_computes_is_counted_as_it_runs(model, linear, recipe_counts):
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with autocast("cpu", recipe=RECIPE), recipe_counts() as counts:
        compiled(X)
        compiled(X)
    assert [(record.op, record.calls, record.declined) for record in counts.records()] == [("aten::linear", 4, "")]


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_a_weight_that_cannot_be_packed_runs_in_the_fast_dtype_in_compiled_code(linear):
    layer = nn.Linear(8, 8)
    layer.weight[0, 0] = float("nan")
    compiled = torch.compile(layer, backend="inductor", fullgraph=True)
    with autocast("cpu", recipe=RECIPE):
        assert torch.equal(compiled(X).nan_to_num(), layer(X).nan_to_num())
    assert (linear.prepared, linear.ran) == (1, 0)


@pytest.mark.parametrize("strict", [True, False])
def test_a_region_with_a_recipe_cannot_be_exported(linear, strict):
    def forward(self, x):
        with autocast("cpu", recipe=RECIPE):
            return self.layer(x)

    with pytest.raises(Exception, match=r"recipe= cannot be exported|this region cannot be traced"):
        torch.export.export(Defined(forward, layer=nn.Linear(8, 8)), (X,), strict=strict)


def test_a_model_that_is_exported_in_a_region_with_a_recipe_has_torchs_ops(model, linear):
    with autocast("cpu", recipe=RECIPE):
        exported = torch.export.export(model, (X,))
    targets = {str(node.target) for node in exported.graph.nodes}
    assert not any("polycast" in target for target in targets)


def test_a_dispatch_mode_sees_one_op(model, linear):

    with autocast("cpu", recipe=RECIPE):
        expected = model(X)
        with Seen() as seen:
            assert torch.equal(model(X), expected)
    assert sum("low_bit_aten_linear" in str(op) for op in seen.ops) == 2
    assert linear.ran == 4


def test_a_checkpoint_in_compiled_training_does_not_use_it(model, linear):
    from torch.utils.checkpoint import checkpoint

    @torch.compile(backend="aot_eager")
    def function(x):
        return checkpoint(model, x, use_reentrant=False)

    with torch.enable_grad(), autocast("cpu", recipe=RECIPE):
        function(X).sum().backward()
    assert linear.ran == 0
