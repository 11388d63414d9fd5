"""``compare(recipe=...)``: the error that a recipe adds in each module, and the ops that it declined."""

import json

import pytest
import torch
from tests.plugins.models import distance
from torch import nn

import polycast
from polycast import Int8
from polycast.plugin import events

pytestmark = pytest.mark.usefixtures("int8_in_python")
RECIPE = Int8(min_size=0)


@pytest.fixture
def model():
    """Two layers; the second receives channels that are much larger than the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)).eval()
    with torch.no_grad():
        model[1].weight[:2] *= 3000
        model[2].weight[:, :2] /= 3000
    return model


@pytest.fixture
def x():
    return torch.randn(16, 32)


def compare(model, x, **settings):
    return polycast.compare(model, x, **{"recipe": RECIPE, **settings})


def errors(comparison):
    return {module.name: module.own.relative for module in comparison.modules}


def test_the_module_that_the_recipe_harms_comes_first(model, x, engine):
    comparison, without = compare(model, x), compare(model, x, recipe=None)
    assert comparison.modules[0].name == "2"
    assert errors(comparison)["2"] > 10 * errors(without)["2"]
    assert errors(comparison)["1"] == pytest.approx(errors(without)["1"])


def test_the_output_is_that_of_a_region_with_the_recipe(model, x, engine):
    expected = pytest.approx(distance(model, x, {}, recipe=RECIPE), rel=1e-4)
    assert compare(model, x).outputs["output"].relative == expected


def test_a_rule_takes_a_module_out_of_the_recipe(model, x):
    policy = polycast.Policy(modules={"2": "none"})
    assert errors(compare(model, x, policy=policy))["2"] == errors(compare(model, x, recipe=None))["2"]


def test_computed_and_declined_ops_are_counted_once_per_call_in_the_region(x, engine):
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 64))
    comparison = compare(model, x, recipe=Int8(min_size=1024))
    assert {(each.op, each.declined, each.calls) for each in comparison.low_bit} == {
        ("aten::linear", "", 1),
        ("aten::linear", "the weight is smaller than the recipe's min_size", 1),
    }
    assert "int8 on cpu: linear computed once" in str(comparison)
    assert "float32 against a region of bfloat16 and int8 on cpu: relative errors." in str(comparison)


def test_the_text_says_if_the_recipe_computed_nothing_and_mentions_none_without_one(model, x):
    text = str(compare(model, x, recipe=Int8()))
    assert "linear declined 2 times: the weight is smaller than the recipe's min_size" in text
    assert "Nothing was computed by Int8(): these are the errors of bfloat16." in text
    comparison = compare(model, x, recipe=None)
    assert (comparison.recipe, comparison.low_bit) == (None, ())
    assert "int8" not in str(comparison)


def test_the_plain_data_has_the_recipe_and_the_counts(model, x):
    said = json.loads(json.dumps(compare(model, x).to_dict(), allow_nan=False))
    counts = {"device": "cpu", "recipe": "int8", "op": "aten::linear", "declined": "", "calls": 2, "package": ""}
    assert (said["recipe"], said["low_bit"]) == ("int8", [counts])
    assert not events.recipe_call


@pytest.mark.parametrize(
    ("recipe", "error", "message"),
    [
        ("float8", RuntimeError, "Float8() cannot be used on cpu: there is int8 only"),
        ("int9", ValueError, "'int9' is not a recipe"),
        (Int8, TypeError, "recipe is the class Int8: call it, Int8()"),
    ],
    ids=str,
)
def test_a_recipe_that_cannot_be_used_is_refused(model, x, recipe, error, message):
    with pytest.raises(error) as caught:
        compare(model, x, recipe=recipe)
    assert message in str(caught.value)
