"""The recipes of plugins: immutable values, their names, and rules in policy files."""

import copy
import pickle
from types import SimpleNamespace

import pytest

from polycast import Fastest, Float8, Int8, NoRecipe, Policy
from polycast.plugin import Recipe
from polycast.policy.recipe import kinds, read_recipe

RECIPES = [
    *(Int8(), Int8("tensor"), Int8(ops=("linear",)), Int8(min_size=1), Float8(), NoRecipe()),
    *(Fastest(), Fastest("a folder/profile.json"), Fastest(ops=("mm",), min_size=7)),
    Fastest(SimpleNamespace(digest="0123456789abcdef")),
]


def test_equality_of_recipes(subtests):
    for recipe in RECIPES:
        with subtests.test(recipe=recipe):
            for twin in (
                copy.copy(recipe),
                copy.deepcopy(recipe),
                pickle.loads(pickle.dumps(recipe)),
                Recipe.of_text(recipe.text),
            ):
                assert (twin == recipe, hash(twin), twin.text) == (True, hash(recipe), recipe.text)
            assert [other for other in RECIPES if other == recipe] == [recipe]


def test_the_spelling_of_ops_does_not_matter():
    assert Int8(ops=["linear", "aten::mm"]) == Int8(ops=("mm", "linear", "mm"))
    assert "aten::mm" in Int8(ops=("mm",)).overloads


@pytest.mark.parametrize("kind", [Int8, Fastest])
def test_the_order_of_the_default_ops_does_not_matter(kind):
    assert kind(ops=kind().ops[::-1]) == kind()


def test_it_cannot_be_changed():
    with pytest.raises(AttributeError, match="cannot assign to field 'scales'"):
        Int8().scales = "tensor"
    with pytest.raises(AttributeError, match="cannot assign to field 'min_sise'"):
        Int8().min_sise = 1
    with pytest.raises(AttributeError, match="cannot delete field 'scales'"):
        del Int8().scales


def test_a_subclass_may_have_a_constructor_of_its_own():
    class Sized(Int8):
        kind = "sized"

        def __init__(self, size):
            super().__init__(min_size=size)

    recipe = Sized(7)
    assert recipe == Recipe.of_text(recipe.text) == copy.deepcopy(recipe)
    assert recipe != Int8(min_size=7)


@pytest.mark.parametrize(
    ("text", "recipe"),
    [("int8", Int8()), ("int8:tensor", Int8("tensor")), ("float8:row", Float8()), ("none", NoRecipe())],
)
def test_read_recipe_takes_names(text, recipe):
    assert read_recipe(text) == recipe


INVALID = [
    (lambda: read_recipe("int9"), ValueError, "'int9' is not a recipe: did you mean 'int8'?"),
    (lambda: read_recipe("int8:column"), ValueError, "'int8:column' is not a recipe: did you mean"),
    (lambda: read_recipe("none:row"), ValueError, "'none:row' is not a recipe"),
    (lambda: read_recipe(Int8), TypeError, r"recipe is the class Int8: call it, Int8\(\)"),
    (
        lambda: read_recipe(8),
        TypeError,
        r"recipe must be a Recipe such as polycast.Int8\(\), the name of one, or None, got 8",
    ),
    (lambda: Int8("column"), ValueError, "scales must be 'row' or 'tensor', got 'column'"),
    (lambda: Int8(ops="mm"), TypeError, "ops must be names of ops, such as"),
    (lambda: Int8(ops=("liner",)), ValueError, "has no op 'liner'; the nearest"),
    (lambda: Int8(min_size=-1), ValueError, "min_size must not be negative, got -1"),
    (lambda: Int8(min_size=2.0), TypeError, "min_size must be an int, got 2.0"),
    (lambda: Int8(keep=()), TypeError, "unexpected keyword argument 'keep'"),
    (lambda: Recipe(), TypeError, "Recipe is no kind of recipe: use one such as polycast.Int8"),
    (lambda: Fastest(7), TypeError, "profile must be a DeviceProfile, the path of a saved one, or None, got 7"),
    (lambda: read_recipe("fastest:row"), ValueError, "'fastest:row' is not a recipe: did you mean"),
    (lambda: Fastest(SimpleNamespace(digest="0")).written, ValueError, "cannot be written: its profile is an object"),
]


def test_an_invalid_recipe_is_refused(subtests):
    for make, error, text in INVALID:
        with subtests.test(make=make, error=error, text=text), pytest.raises(error, match=text):
            make()


def test_regions_share_a_recipe_given_by_name():
    assert read_recipe("int8:tensor") is read_recipe("int8:tensor")


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("none", 'head = "none"'),
        (NoRecipe(), 'head = "none"'),
        (Int8(), 'head = "int8"'),
        ("int8:tensor", 'head = "int8:tensor"'),
        ("fastest", 'head = "fastest"'),
    ],
    ids=str,
)
def test_a_policy_file_has_the_name_of_a_recipe(rule, line, tmp_path):
    policy = Policy(modules={"head": rule})
    policy.save(tmp_path / "policy.toml")
    assert line in policy.text().splitlines()
    assert Policy().diff(policy) == [f"+ modules.head = {line.partition(' = ')[2]}".replace('"', "'")]
    assert Policy.load(tmp_path / "policy.toml") == policy


def test_a_policy_file_has_a_table_for_a_recipe_with_settings(tmp_path):
    modules = {"head": Int8(ops=("linear",), min_size=0), "tail": Float8("tensor", min_size=9)}
    policy = Policy(modules={**modules, "body": Fastest("machine.json"), "*": Fastest(min_size=9)})
    policy.save(tmp_path / "policy.toml")
    assert Policy.load(tmp_path / "policy.toml") == policy


def test_a_calibration_is_a_setting_of_int8():
    calibration = SimpleNamespace(digest="0e", prepack_arguments=None)
    assert Int8(calibration=calibration) == Int8(calibration=calibration) != Int8()
    assert Int8(calibration=calibration).format != Int8().format
    with pytest.raises(TypeError, match=r"calibration must be a Calibration, .*, or None, got 'a path'"):
        Int8(calibration="a path")


def test_its_kind_is_taken():
    with pytest.raises(ValueError, match=r"Mine.kind is 'int8', which is the kind of \S+\.low_bit_recipes\.Int8:"):
        type("Mine", (Recipe,), {"kind": "int8"})
    assert kinds["int8"] is Int8
