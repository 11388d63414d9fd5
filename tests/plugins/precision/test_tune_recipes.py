"""``tune(recipe=...)``: modules that must leave a recipe, and modules that need float32."""

import json

import pytest
import torch
from tests.plugins.models import Defined, distance
from torch import nn

import polycast
from polycast import Int8, NoRecipe, Policy
from polycast_plugins.precision import timing
from polycast_plugins.precision.calls import ModelCall
from polycast_plugins.precision.candidates import Blocks, ModuleCandidates, OpCandidates
from polycast_plugins.precision.minimal_set import Choice
from polycast_plugins.precision.profiling_run import profile_runs
from polycast_plugins.precision.timing import PLAIN_REGION

pytestmark = pytest.mark.usefixtures("int8_in_python")
RECIPE = Int8(min_size=0)


def outliers(layer, norm, factor=3000.0):
    """Make a few input channels of a layer much larger than the others, without changing the function."""
    with torch.no_grad():
        norm.weight[:2] *= factor
        layer.weight[:, :2] /= factor


def block(width, much):
    norm, up, down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
    if much:
        outliers(up, norm)
    return Defined(lambda self, x: x + self.down(self.up(self.norm(x)).relu()), norm=norm, up=up, down=down)


def planted(*culprits, blocks=5):
    torch.manual_seed(0)
    return nn.Sequential(*(block(32, n in culprits) for n in range(blocks))).eval(), torch.randn(16, 32)


def tune(model, x, **arguments):
    """Tune, and check that the result keeps the tolerance and, if it says so, is minimal."""
    settings = {"tolerance": 2e-2, "recipe": RECIPE}
    tuned = polycast.tune(model, x, **{**settings, **arguments})
    evidence = tuned.evidence
    tried = {(frozenset(trial.members), frozenset(trial.kept)): trial.distance for trial in evidence.trials}
    members, kept = frozenset(evidence.members), frozenset(evidence.kept)
    assert tuned.met
    assert evidence.distance <= evidence.tolerance
    if evidence.is_minimal:
        assert all(tried[members, kept - {name}] > evidence.tolerance for name in kept)
        assert all(tried[members - {name}, kept | {name}] > evidence.tolerance for name in members)
    return tuned


@pytest.mark.parametrize(("culprits", "tolerance"), [((1,), 2e-2), ((0, 3), 2e-2), ((), 0.05)], ids=str)
def test_the_layers_with_outlier_channels_leave_the_recipe_and_no_others(culprits, tolerance, engine):
    tuned = tune(*planted(*culprits), tolerance=tolerance)
    assert set(tuned.evidence.kept) == {f"{n}.up" for n in culprits}
    assert tuned.evidence.members == ()
    assert tuned.evidence.is_minimal
    assert dict(tuned.policy.modules) == {"": RECIPE, **{f"{n}.up": NoRecipe() for n in culprits}}


def test_layers_that_need_float32_are_in_float32_and_the_others_stay_in_the_recipe(engine):
    model, x = planted(1)
    with torch.no_grad():  # more than float16 can hold
        model[3].up.weight.mul_(1e6)
        model[3].down.weight.mul_(1e-6)
    tuned = tune(model, x, dtype=torch.float16)
    assert set(tuned.evidence.members) == {"3.up", "3.down"}
    assert tuned.evidence.kept == ("1.up",)
    assert {name: str(rule) for name, rule in tuned.policy.modules.items()} == {
        "": str(RECIPE),
        "1.up": "NoRecipe()",
        "3.up": "fp32",
        "3.down": "fp32",
    }
    assert tuned.evidence.is_minimal


def test_the_policy_works_with_and_without_the_recipe_of_the_region_and_from_a_file(tmp_path, engine):
    model, x = planted(1)
    tuned = tune(model, x)
    tuned.save(tmp_path / "int8.toml")
    assert Policy.load(tmp_path / "int8.toml") == tuned.policy
    expected = pytest.approx(tuned.evidence.distance)
    assert distance(model, x, tmp_path / "int8.toml") == expected
    assert distance(model, x, tuned.policy, recipe=RECIPE) == expected


def test_the_evidence_has_the_distances_of_the_recipe_and_the_fast_dtype():
    evidence = tune(*planted(1)).evidence
    assert evidence.plain > evidence.tolerance >= evidence.fast
    first, second, *_ = evidence.lines()
    assert first == "Sequential on cpu, bfloat16, int8: 0 of 21 modules in float32, 1 kept in bfloat16"
    assert second.endswith(f"; without a policy {evidence.plain:.3g}, all in bfloat16 {evidence.fast:.3g}")
    said = json.loads(json.dumps(evidence.to_dict(), allow_nan=False))
    assert (said["recipe"], said["kept"], said["members"]) == ("int8", ["1.up"], [])
    assert "in bfloat16 and int8 on cpu, tuned for accuracy" in evidence.name()


def test_ops_can_leave_the_recipe(engine):
    model, x = planted(1)
    tuned = tune(model, x, over="ops")
    assert tuned.policy == Policy({"linear": "lower_precision_fp"}, name=tuned.policy.name)
    assert tuned.evidence.kept == ("linear",)
    with torch.no_grad(), polycast.autocast("cpu", recipe=RECIPE, policy=tuned.policy):
        in_region = model(x)
    with torch.no_grad(), polycast.autocast("cpu"):
        assert torch.equal(model(x), in_region)


def test_the_result_keeps_the_tolerance_when_the_budget_is_spent():
    tuned = tune(*planted(1), budget=3)
    assert (tuned.met, tuned.evidence.is_minimal) == (True, False)
    assert tuned.evidence.reason == "the budget was spent after 3 evaluations"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"recipe": "int9"}, ValueError, "'int9' is not a recipe: did you mean 'int8'?"),
        ({"recipe": 8}, TypeError, "recipe must be a Recipe such as polycast.Int8(), the name of one, or None, got 8"),
        ({"recipe": "float8"}, RuntimeError, "cannot be used on cpu: there is int8 only"),
        ({"budget": 2}, ValueError, "at least 3 (the region without a policy, and everything in float32, and in the"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(arguments, error, message):
    with pytest.raises(error) as caught:
        tune(*planted(), **arguments)
    assert message in str(caught.value)


def test_the_recipe_none_is_a_search_without_a_recipe():
    model, x = planted()
    assert tune(model, x, recipe="none").evidence.recipe is None


@pytest.mark.parametrize("over", ["modules", "ops"])
def test_all_three_precisions_are_timed(quick, over):
    quick("all in the fast dtype")
    model, x = planted()
    tuned = tune(model, x, objective="time", tolerance=0.1, over=over)
    seconds = tuned.evidence.timings.seconds
    assert {PLAIN_REGION, "all in float32", "all in the fast dtype"} <= set(seconds)
    assert distance(model, x, tuned.policy, recipe=RECIPE) == pytest.approx(tuned.evidence.fast)


def test_the_recipe_alone_is_chosen_where_it_is_the_fastest(quick):
    quick(PLAIN_REGION)
    tuned = tune(*planted(), objective="time", tolerance=0.1)
    assert dict(tuned.policy.modules) == {"": RECIPE}


@pytest.mark.slow
def test_the_fastest_leaves_the_recipe_where_the_tolerance_needs_it(monkeypatch):
    monkeypatch.setattr(timing, "_ROUNDS", 1)
    evidence = tune(*planted(1), objective="time").evidence
    assert "1.up" in (*evidence.kept, *evidence.members)
    assert PLAIN_REGION not in evidence.timings.seconds


@pytest.mark.parametrize(
    ("recipe", "choice", "rules"),
    [
        (RECIPE, Choice(), {"": RECIPE}),
        (RECIPE, Choice(in_fast_dtype=("first",)), {"": RECIPE, "first": "none"}),
        (RECIPE, Choice(in_fast_dtype=("",)), {"": "none", "first": RECIPE, "last": RECIPE}),
        (RECIPE, Choice(("",)), {"": "fp32", "first": RECIPE, "last": RECIPE}),
        (RECIPE, Choice(("",), ("first", "last")), {"": "fp32", "first": "none", "last": "none"}),
        (RECIPE, Choice(("first",), ("", "act")), {"": "none", "first": "fp32", "last": RECIPE}),
        (None, Choice(("",)), {"": "fp32", "first": "float16", "last": "float16"}),
        (None, Choice(("", "act", "last")), {"": "fp32", "first": "float16"}),
        (None, Choice(("act",)), {"act": "fp32"}),
    ],
    ids=str,
)
def test_a_module_has_a_rule_where_its_precision_is_not_that_of_its_caller(recipe, choice, rules):
    parts = {"first": nn.Linear(4, 4), "act": nn.ReLU(), "last": nn.Linear(4, 4)}
    model = Defined(lambda self, x: self.last(self.act(self.first(x))), **parts)
    seen, _ = profile_runs(model, (ModelCall.of(model, torch.randn(2, 4)),), "cpu")
    assert ModuleCandidates(Blocks(model, seen), torch.float16, recipe).policy(choice) == Policy(modules=rules)


def test_only_the_ops_of_a_recipe_can_leave_it():
    ops = OpCandidates(Int8(ops=("linear",)))
    assert [name for name in ("linear", "mm", "exp") if ops.can_leave_recipe(name)] == ["linear"]
    assert not OpCandidates().can_leave_recipe("linear")
