"""Recipes that backends declare: equality, text, names, pickles and policy files follow from their settings."""

import copy
import enum
import pickle
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.core.rounding import Rounded

from polycast import NoRecipe, Policy
from polycast.plugin import Recipe
from polycast.policy import recipe_settings
from polycast.policy.recipe import all_recipes, kinds, read_recipe
from polycast.policy.recipe_settings import ObjectDigest, resolve

FOLDER = Path(__file__).parents[3]


class Grouped(Recipe):
    kind = "grouped"
    plan_class = "tests.core.rounding:RoundedPlan"
    group_size: Literal[32, 64] = 32
    rounding: Literal["nearest", "up"] = "nearest"
    clip: float = 1.0
    symmetric: bool = True
    codes: tuple[int, ...] = ()
    table: Any = None
    ops: Sequence[str] = ("mm", "linear")
    min_size: int = 16

    def check(self) -> None:
        if self.clip <= 0:
            raise ValueError(f"clip must be positive, got {self.clip}")


class Bare(Recipe):
    kind = "bare"


KINDS = {kind: kinds.pop(kind) for kind in ("grouped", "bare")}


@pytest.fixture(autouse=True)
def _only_for_these_tests(monkeypatch):
    for kind, each in KINDS.items():
        monkeypatch.setitem(kinds, kind, each)


class Table:
    def __init__(self, digest):
        self.digest = digest


RECIPES = [
    *(Bare(), Grouped(), Grouped(64), Grouped(rounding="up"), Grouped(clip=2), Grouped(symmetric=False)),
    *(Grouped(codes=(1, 2)), Grouped(table="a b), (c"), Grouped(table=Table("0a")), Grouped(table=Table("0b"))),
    *(Grouped(ops=()), Grouped(min_size=0)),
]


def test_each_setting_makes_another_recipe():
    for recipe in RECIPES:
        assert [other for other in RECIPES if other == recipe] == [recipe]
        assert [other for other in RECIPES if other.text == recipe.text] == [recipe]
    assert len({*RECIPES}) == len({hash(each) for each in RECIPES}) == len(RECIPES)
    assert Grouped(32) != Grouped(64)


def test_copies_and_texts_restore_each_setting(subtests):
    for recipe in RECIPES:
        with subtests.test(recipe=recipe):
            for twin in (
                copy.copy(recipe),
                copy.deepcopy(recipe),
                pickle.loads(pickle.dumps(recipe)),
                Recipe.of_text(recipe.text),
                recipe.with_options(**recipe.settings),
            ):
                assert (twin, hash(twin), twin.text, repr(twin)) == (recipe, hash(recipe), recipe.text, repr(recipe))
                assert type(twin) is type(recipe)


@pytest.mark.slow
def test_texts_are_the_same_in_another_process():
    code = "from tests.core.rounding import Rounded; print(Rounded('tensor', ops=['linear', 'mm'], min_size=3).text)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=FOLDER)
    assert ran.stdout.strip() == Rounded("tensor", ops=("mm", "linear"), min_size=3).text


def test_a_repr_has_what_differs_from_the_defaults():
    assert repr(Grouped()) == "Grouped()"
    assert repr(Grouped(64, codes=[7], table=Table("0a"))) == "Grouped(group_size=64, codes=(7,), table=<Table 0a>)"


def test_choices_of_strs_are_part_of_the_name():
    assert (Grouped(64).short, Grouped(rounding="up").short) == ("grouped", "grouped:up")
    assert read_recipe("grouped:up") == Grouped(rounding="up")
    assert read_recipe("grouped:nearest") == read_recipe("grouped") == Grouped()
    assert Grouped() in all_recipes()
    for name in ("grouped:64", "grouped:up:up", "grouped:up:nearest", "bare:up"):
        with pytest.raises(ValueError, match=f"'{name}' is not a recipe"):
            read_recipe(name)


@pytest.mark.parametrize(
    ("recipe", "written"),
    [
        (Bare(), "bare"),
        (Grouped(), "grouped"),
        (Grouped(rounding="up"), "grouped:up"),
        (Grouped(64), {"recipe": "grouped", "group_size": 64}),
        (
            Grouped(rounding="up", codes=(1,), ops=("mm",), clip=3),
            {"recipe": "grouped:up", "clip": 3.0, "codes": [1], "ops": ["mm"]},
        ),
    ],
    ids=repr,
)
def test_a_policy_file_has_the_settings_that_differ(recipe, written, tmp_path):
    policy = Policy(modules={"head": recipe})
    policy.save(tmp_path / "policy.toml")
    assert recipe.written == written
    assert Policy.load(tmp_path / "policy.toml") == policy == Policy(modules={"head": written})
    assert Policy.load(tmp_path / "policy.toml").text() == policy.text()


INVALID_TABLES = [
    ({"recipe": "grouped", "size": 64}, "the table of a recipe 'grouped' has 'recipe', 'group_size', .*; got 'size'"),
    ({"recipe": "grouped", "group_size": 65}, "group_size must be 32 or 64, got 65"),
    ({"recipe": "grouped", "symmetric": 1}, "symmetric must be a bool, got 1"),
    ({"recipe": "bare", "min_size": 1}, "the table of a recipe 'bare' has 'recipe'; got 'min_size'"),
    ({"recipe": 3}, "'recipe' in a table is the name of a recipe such as 'int8', got 3"),
]


def test_an_invalid_table_is_refused(subtests):
    for table, text in INVALID_TABLES:
        with subtests.test(table=table), pytest.raises(ValueError, match=text):
            Policy(modules={"head": table})


INVALID = [
    ({"group_size": 33}, ValueError, "group_size must be 32 or 64, got 33"),
    ({"rounding": "down"}, ValueError, "rounding must be 'nearest' or 'up', got 'down'"),
    ({"symmetric": "yes"}, TypeError, "symmetric must be a bool, got 'yes'"),
    ({"clip": "1"}, TypeError, "clip must be a float, got '1'"),
    ({"clip": True}, TypeError, "clip must be a float, got True"),
    ({"clip": float("inf")}, TypeError, "clip must have strs, finite numbers, bools and None only, got inf"),
    ({"clip": -1}, ValueError, "clip must be positive, got -1"),
    ({"table": object()}, TypeError, "table must be a str, .* or an object with a `digest`; got <object"),
    ({"table": (object(),)}, TypeError, "table must have strs, finite numbers, bools and None only"),
    ({"min_size": True}, TypeError, "min_size must be an int, got True"),
    ({"size": 1}, TypeError, "size"),
]


def test_an_invalid_setting_is_refused(subtests):
    for settings, error, text in INVALID:
        for make in (Grouped, Grouped().with_options):
            with subtests.test(settings=settings, make=make), pytest.raises(error, match=text):
                make(**settings)


@pytest.mark.parametrize("base", [Rounded, Grouped])
def test_a_subclass_needs_a_kind_of_its_own_with_which_it_is_read_back(base, monkeypatch):
    message = (
        f"Mine needs a kind of its own, such as kind = 'mine': what is written with the kind {base.kind!r} is read as "
        f"{base.__name__}"
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        type("Mine", (base,), {})
    assert kinds[base.kind] is base
    mine = type("Mine", (base,), {"kind": "mine"})
    monkeypatch.setitem(kinds, "mine", kinds.pop("mine"))
    recipe = mine(min_size=3)
    assert Recipe.of_text(recipe.text) == recipe != base(min_size=3)
    assert isinstance(Recipe.of_text(recipe.text), mine)


def test_a_class_without_kind_or_default_is_refused():
    class Abstract(Recipe):
        size: int = 1

    with pytest.raises(TypeError, match="Abstract is no kind of recipe"):
        Abstract()
    refused = [
        ("Unsized", {"kind": "unsized", "__annotations__": {"size": int}}, "Unsized.size needs a default"),
        ("Planless", {"kind": "planless", "ops": ("mm",)}, "Planless needs a plan_class for its ops, as polycast_plug"),
        ("Colon", {"kind": "a:b"}, "Colon.kind must be a name such as 'int8', got 'a:b'"),
        ("Mine", {"kind": "rounded"}, "Mine.kind is 'rounded', which is the kind of tests.core.rounding.Rounded"),
    ]
    for name, body, text in refused:
        with pytest.raises((TypeError, ValueError), match=text):
            type(name, (Recipe,), body)
    assert "unsized" not in kinds
    assert kinds["rounded"] is Rounded


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rounding": Literal["up", "down"], "scales": Literal["down", "up"]}, "rounding and .scales both list 'down'"),
        ({"rounding": Literal["up", "a:b"]}, "rounding must list words such as 'row', for names, got 'a:b'"),
        ({"rounding": Literal["up", ""]}, "rounding must list words such as 'row', for names, got ''"),
        ({"rounding": Literal["down"]}, r"rounding must be one of \('down',\), got the default 'up'"),
    ],
)
def test_a_class_whose_names_would_be_ambiguous_is_refused(settings, text):
    defaults = {"rounding": "up", "scales": "down"}
    with pytest.raises(ValueError, match=text):
        type("Words", (Recipe,), {"kind": "words", "__annotations__": settings, **{k: defaults[k] for k in settings}})
    assert "words" not in kinds


class Rounding(str, enum.Enum):
    UP = "up"


@pytest.mark.parametrize(
    ("given", "recipe"),
    [
        ({"group_size": 64.0}, Grouped(64)),
        ({"group_size": torch.tensor(64)}, Grouped(64)),
        ({"rounding": Rounding.UP}, Grouped(rounding="up")),
    ],
)
def test_a_listed_value_may_be_given_in_another_type(given, recipe):
    twin = Grouped(**given)
    assert (twin, twin.text, twin.settings) == (recipe, recipe.text, recipe.settings)
    assert [type(each) for each in twin.settings.values()] == [type(each) for each in recipe.settings.values()]


def test_a_class_may_be_defined_again_as_in_a_notebook():
    first = read_recipe("bare")
    again = type("Bare", (Recipe,), {"kind": "bare", "__module__": __name__, "__qualname__": "Bare"})
    assert type(Recipe.of_text("bare()")) is again
    assert read_recipe("bare") == again() != first


def test_an_object_is_known_by_its_digest():
    table = Table("0c")
    recipe = Grouped(table=table)
    assert Recipe.of_text(recipe.text).table is table
    assert "0c" in recipe.format


def test_an_object_of_another_process_is_known_once_this_one_has_it():
    text = Grouped(table=ObjectDigest("0d")).text
    early = Recipe.of_text(text)
    assert early.table == resolve(early.table) == ObjectDigest("0d")
    table = Table("0d")
    assert Grouped(table=table) == early == pickle.loads(pickle.dumps(early))
    assert resolve(early.table) is table


def test_what_prepacked_weights_depend_on_leaves_out_ops_and_min_size():
    assert len({each.format for each in RECIPES}) == len(RECIPES) - 2
    assert (Grouped(ops=(), min_size=0).format, NoRecipe().format) == (Grouped().format, "none()")


def test_a_policy_has_recipes_that_its_file_cannot_have(tmp_path):
    table = Table("a1")
    policy = Policy(modules={"head": Grouped(table=table), "body": "rounded"})
    assert repr(policy) == "Policy(modules={'head': Grouped(table=<Table a1>), 'body': 'rounded'})"
    assert Policy(modules={"body": "rounded"}).diff(policy)[0] == "+ modules.head = Grouped(table=<Table a1>)"
    assert "&lt;Table a1&gt;" in policy._repr_html_()
    copied = pickle.loads(pickle.dumps(policy))
    assert copied == policy
    assert copied.modules["head"].table.digest == table.digest
    text = "cannot be written: its table is an object.* A Policy made in Python can have it"
    for write in (policy.text, lambda: policy.save(tmp_path / "policy.toml")):
        with pytest.raises(ValueError, match=text):
            write()


def test_a_text_is_read_though_another_thread_disturbs_the_parser(monkeypatch):
    parse, failures = recipe_settings.ast.parse, [SystemError("AST constructor recursion depth mismatch")]

    def disturbed(*args, **kwargs):
        if failures:
            raise failures.pop()
        return parse(*args, **kwargs)

    monkeypatch.setattr(recipe_settings.ast, "parse", disturbed)
    assert Recipe.of_text(Rounded(min_size=12345).text) == Rounded(min_size=12345)
    assert failures == []
