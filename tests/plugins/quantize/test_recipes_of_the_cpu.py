"""What every recipe of the CPU promises, with its own kernels: in regions, rules, files, compiled code and tools."""

import pytest
import torch
from torch import nn

import polycast
from polycast import Int4, Int8, Policy, WeightCache, autocast

RECIPES = [Int8(), Int8("tensor"), Int4(), Int4(64), Int4(128)]
pytestmark = pytest.mark.usefixtures("engine", "no_grad")


@pytest.fixture(params=RECIPES, ids=repr)
def recipe(request):
    answer = polycast.plugin.check(polycast.plugin.get_backend("cpu"), request.param)
    if not answer:
        pytest.skip(answer.reason)
    yield request.param
    polycast.clear_autocast_cache()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 256), nn.ReLU(), nn.Linear(256, 300), nn.Linear(300, 8)).eval()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(5, 300)


def error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def run(model, x, recipe=None, **settings):
    with autocast("cpu", recipe=recipe, **settings):
        return model(x)


@pytest.mark.parametrize("call", ["linear", "mm", "addmm", "matmul"])
def test_each_op_is_computed_by_it(recipe, call, recipe_counts):
    weight, bias, x = nn.Parameter(torch.randn(300, 256)), torch.randn(256), torch.randn(3, 300)
    linear = nn.Parameter(weight.detach().t().contiguous())
    calls = {
        "linear": lambda: nn.functional.linear(x, linear),
        "mm": lambda: torch.mm(x, weight),
        "addmm": lambda: torch.addmm(bias, x, weight),
        "matmul": lambda: x @ weight,
    }
    with recipe_counts() as counts, autocast("cpu", recipe=recipe):
        result = calls[call]()
    (record,) = counts.records()
    assert (record.op, record.recipe, record.declined) == (f"aten::{call}", recipe.short, "")
    assert error(result, calls[call]()) < 0.2


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_recipes_have_results_of_their_own_which_a_saved_cache_keeps(model, x, recipe, tmp_path):
    cache = WeightCache()
    results = {each: run(model, x, each, cache=cache) for each in RECIPES}
    assert [each for each in RECIPES if torch.equal(results[each], run(model, x, recipe))] == [recipe]
    cache.save(tmp_path / "model", model)
    loaded = WeightCache.load(tmp_path / "model", model)
    assert torch.equal(run(model, x, recipe, cache=loaded), results[recipe])
    # Of the two large weights. Int8's recipes have prepacked weights of their own too.
    assert (loaded.stats().packings, loaded.stats().misses) == (2 * len(RECIPES), 0)


def test_a_rule_of_a_policy_file_uses_it(model, x, recipe, tmp_path):
    path = tmp_path / "policy.toml"
    Policy(modules={"0": recipe, "2": "none"}).save(path)
    assert Policy.load(path).modules["0"] == recipe
    first = run(model[0], x, recipe)
    with polycast.apply_policy(model, path), autocast("cpu", recipe="int8"):
        assert torch.equal(model[0](x), first)
        result = model[2](first)
    assert torch.equal(result, run(model[2], first))


def test_a_name_stands_for_it(model, x, recipe):
    if recipe.written == recipe.short:
        assert torch.equal(run(model, x, recipe.short), run(model, x, recipe))
    else:
        assert recipe.written == {"recipe": "int4", "group_size": recipe.group_size}


def test_compiled_code_has_its_results(model, x, recipe):
    torch._dynamo.reset()
    outside = torch.compile(model, backend="aot_eager", fullgraph=True)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def inside(x):
        with autocast("cpu", recipe=recipe):
            return model(x)

    for each in (recipe, "int8") * 2:
        assert torch.equal(run(outside, x, each), run(model, x, each))
        assert torch.equal(inside(x), run(model, x, recipe))


def test_compare_shows_its_errors(model, x, recipe):
    compared = [polycast.compare(model, x, device_type="cpu", recipe=each) for each in (recipe, "none")]
    assert recipe.short in str(compared[0])
    assert {(each.recipe, each.calls) for each in compared[0].low_bit if not each.declined} == {(recipe.short, 2)}
    by_recipe, by_dtype = (next(iter(each.outputs.values())).relative for each in compared)
    assert by_recipe > by_dtype > 0


def test_tune_finds_what_must_leave_it(model, x, recipe):
    model[0].weight[:, :2] *= 1e-4
    x[:, :2] *= 1e4
    tuned = polycast.tune(model, x, tolerance=0.02, device_type="cpu", recipe=recipe)
    assert tuned.met
    with polycast.apply_policy(model, tuned.policy), autocast("cpu", recipe=recipe):
        result = model(x)
    assert error(result, model(x)) <= 0.02
