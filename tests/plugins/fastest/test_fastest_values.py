"""The recipe "fastest" as an immutable value, and in policy files."""

import copy
import pickle
from types import SimpleNamespace

import pytest

from polycast import Fastest, Int8, NoRecipe, Policy
from polycast.plugin import Recipe, read_recipe

RECIPES = [
    Int8(),
    NoRecipe(),
    Fastest(),
    Fastest("a folder/profile.json"),
    Fastest(SimpleNamespace(digest="0123456789abcdef")),
    Fastest(ops=("mm",), min_size=7),
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


def test_the_order_of_the_default_ops_does_not_matter():
    assert Fastest(ops=Fastest().ops[::-1]) == Fastest()


INVALID = [
    (lambda: Fastest(7), TypeError, "profile must be a DeviceProfile, the path of a saved one, or None, got 7"),
    (lambda: read_recipe("fastest:row"), ValueError, "'fastest:row' is not a recipe: did you mean"),
    (lambda: Fastest(SimpleNamespace(digest="0")).written, ValueError, "cannot be written: its profile is an object"),
]


def test_an_invalid_recipe_is_refused(subtests):
    for make, error, text in INVALID:
        with subtests.test(make=make, error=error, text=text), pytest.raises(error, match=text):
            make()


def test_a_policy_file_has_its_name_or_a_table_of_its_settings(tmp_path):
    policy = Policy(modules={"head": "fastest"})
    assert 'head = "fastest"' in policy.text().splitlines()
    assert Policy().diff(policy) == ["+ modules.head = 'fastest'"]
    for each in (policy, Policy(modules={"body": Fastest("machine.json"), "*": Fastest(min_size=9)})):
        each.save(tmp_path / "policy.toml")
        assert Policy.load(tmp_path / "policy.toml") == each
