"""Recipes in compiled code."""

import pytest
import torch
from tests.plugins.models import Defined
from tests.plugins.modes import Seen
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import polycast
from polycast import Float8, Int4, Int8, WeightCache, autocast
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


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_recipe_may_be_made_in_the_code(linear, made):
    large = nn.Linear(256, 256)

    def function(x):
        with autocast("cpu", recipe=made()):
            return large(x)

    x = torch.randn(2, 256)
    expected, ran = function(x), linear.ran
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(x), expected)
    assert linear.ran == 3 * ran


OF_ARGUMENTS = {
    "Int8": lambda: Int8(scales="tensor", ops=("mm",)),
    "Float8": lambda: Float8(scales="tensor", ops=("mm",)),
    "Int4": lambda: Int4(),
    "Int4(64)": lambda: Int4(64),
    "Int4(ops)": lambda: Int4(group_size=128, ops=["linear", "aten::mm"]),
}


@pytest.mark.parametrize("made", OF_ARGUMENTS.values(), ids=OF_ARGUMENTS)
def test_a_recipe_that_is_made_in_the_code_has_its_arguments(made):
    @torch.compile(backend="eager", fullgraph=True)
    def function(x):
        recipe = made()
        return x + recipe.min_size, recipe.text, recipe.ops, recipe.short

    expected = made()
    sum_, *texts = function(X)
    assert torch.equal(sum_, X + expected.min_size)
    assert texts == [expected.text, expected.ops, expected.short]


def by_default(model, x, recipe=RECIPE):
    with autocast("cpu", recipe=recipe):
        return model(x)


def test_code_is_not_used_with_another_recipe_as_its_argument(model, linear):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(by_default, backend=counter, fullgraph=True)
    for given, computed in (((), 2), ((Int8(min_size=100),), 1), ((polycast.NoRecipe(),), 0)) * 2:
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


def test_code_that_makes_recipes_is_one_graph_without_fullgraph(model):
    def function(x):
        with polycast.autocast("cpu", recipe=polycast.Int8(ops=["linear"])):
            inside = model(x)
        with polycast.autocast("cpu", recipe=polycast.NoRecipe()):
            return inside, model(x)

    explained = torch._dynamo.explain(function)(X)
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


SETTINGS = [
    ({}, 0),
    ({"recipe": RECIPE}, 2),
    ({"recipe": Int8(min_size=100)}, 1),
    ({"recipe": RECIPE, "policy": {"linear": "lower_precision_fp"}}, 0),
]


@pytest.mark.slow
def test_code_is_not_used_under_another_recipe(model, linear):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for settings, computed in SETTINGS * 2:
        before = linear.ran
        with autocast("cpu", **settings):
            result = compiled(X)
            assert linear.ran - before == computed
            assert torch.equal(result, model(X))
    assert counter.frame_count == len(SETTINGS)


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
    odd, x = nn.Linear(7, 4), torch.randn(2, 7)
    compiled = torch.compile(odd, backend="aot_eager", fullgraph=True)
    assert torch.equal(by_default(compiled, x), by_default(odd, x))
    assert linear.ran == 0


def test_training_compiles_as_without_a_recipe(model, linear):
    gradients = []
    with torch.enable_grad():
        for function, recipe in ((torch.compile(model, backend="aot_eager", fullgraph=True), RECIPE), (model, None)):
            model.zero_grad()
            by_default(function, X, recipe).sum().backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
    assert linear.ran == 0
    assert all(map(torch.equal, *gradients))


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
    assert torch.equal(by_default(compiled, X).nan_to_num(), by_default(layer, X).nan_to_num())
    assert (linear.prepared, linear.ran) == (1, 0)


def test_a_region_with_a_recipe_cannot_be_exported(linear):
    def forward(self, x):
        with autocast("cpu", recipe=RECIPE):
            return self.layer(x)

    with pytest.raises(Exception, match=r"recipe= cannot be exported"):
        torch.export.export(Defined(forward, layer=nn.Linear(8, 8)), (X,), strict=False)


def test_a_model_that_is_exported_in_a_region_with_a_recipe_has_torchs_ops(model, linear):
    with autocast("cpu", recipe=RECIPE):
        exported = torch.export.export(model, (X,))
    assert "polycast" not in " ".join(str(node.target) for node in exported.graph.nodes)


def test_a_dispatch_mode_sees_one_op(model, linear):
    expected = by_default(model, X)
    with Seen() as seen:
        assert torch.equal(by_default(model, X), expected)
    assert sum("low_bit_aten_linear" in str(op) for op in seen.ops) == 2
    assert linear.ran == 4


def test_a_checkpoint_in_compiled_training_does_not_use_it(model, linear):
    @torch.compile(backend="aot_eager")
    def function(x):
        return checkpoint(model, x, use_reentrant=False)

    with torch.enable_grad(), autocast("cpu", recipe=RECIPE):
        function(X).sum().backward()
    assert linear.ran == 0
