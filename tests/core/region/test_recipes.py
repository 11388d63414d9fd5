"""Recipes in regions and in module rules: which ops they compute, and where they apply."""

import contextlib

import pytest
import torch
from tests.core.rounding import Rounded
from torch import nn
from torch.utils.checkpoint import checkpoint

import polycast
from polycast import NoRecipe, Policy, autocast
from polycast_backends.cpu import CpuBackend

pytestmark = pytest.mark.usefixtures("no_grad")

RECIPE = Rounded(min_size=1)
X = torch.randn(3, 8)


@pytest.fixture
def layer(engine, int8_kernels):
    return nn.Linear(8, 8)


@pytest.fixture
def ran(int8_kernels):
    """Return a function that says how many linears a call has computed by the recipe."""

    def count(call):
        before = int8_kernels["aten::linear"].ran
        call()
        return int8_kernels["aten::linear"].ran - before

    return count


def test_it_computes_the_products_in_the_fast_dtype(layer, int8_kernels):
    with autocast("cpu", recipe=RECIPE):
        result = layer(X)
        assert (result.dtype, int8_kernels["aten::linear"].ran) == (torch.bfloat16, 1)
        mm = X @ nn.Parameter(torch.randn(8, 4))
        assert (mm.dtype, int8_kernels["aten::matmul"].ran) == (torch.bfloat16, 1)
    with autocast("cpu", torch.float16, recipe="rounded"):
        assert torch.mm(X, X.t()).dtype is torch.float16
    torch.testing.assert_close(result.float(), layer(X), rtol=0.05, atol=0.05)


def test_outside_of_the_region_nothing_is_computed_by_it(layer, ran):
    with autocast("cpu", recipe=RECIPE):
        pass
    assert ran(lambda: layer(X)) == 0
    with autocast("cpu"):
        assert ran(lambda: layer(X)) == 0


def test_regions_inside_inherit_it_replace_it_and_switch_it_off(layer, ran):
    with autocast("cpu", recipe=RECIPE):
        with autocast("cpu", torch.float16):
            assert ran(lambda: layer(X)) == 1
        for off in ("none", NoRecipe(), Rounded(ops=("mm",), min_size=1), Rounded(min_size=65)):
            with autocast("cpu", recipe=off):
                assert ran(lambda: layer(X)) == 0
                with autocast("cpu"):
                    assert ran(lambda: layer(X)) == 0
                with autocast("cpu", recipe=RECIPE):
                    assert ran(lambda: layer(X)) == 1
        with autocast("cpu", enabled=False):
            assert ran(lambda: layer(X)) == 0
            with autocast("cpu"):
                assert ran(lambda: layer(X)) == 1
        assert ran(lambda: layer(X)) == 1


@pytest.mark.parametrize("named", ["lower_precision_fp", "fp32"])
def test_naming_the_policy_of_an_op_takes_the_recipe_off_it(layer, ran, named):
    with_policy, with_recipe = autocast("cpu", policy={"linear": named}), autocast("cpu", recipe=RECIPE)
    with autocast("cpu", recipe=RECIPE, policy={"linear": named}):
        assert ran(lambda: layer(X)) == 0
    for outer, inner in ((with_recipe, with_policy), (with_policy, with_recipe)):
        with outer, inner:
            assert ran(lambda: layer(X)) == 0
    with autocast("cpu", recipe=RECIPE, policy={"softmax": named}):
        assert ran(lambda: layer(X)) == 1


def test_an_op_that_another_policy_is_registered_for_is_not_computed_by_it(layer, ran):
    with polycast.register_op("aten::linear", "fp32", device_type="cpu"), autocast("cpu", recipe=RECIPE):
        assert ran(lambda: layer(X)) == 0


def test_where_autograd_records_the_fast_dtype_is_used(layer, ran):
    with torch.enable_grad():
        with autocast("cpu"):
            expected = layer(X)
        with autocast("cpu", recipe=RECIPE):
            assert ran(lambda: layer(X)) == 0
            assert torch.equal(layer(X), expected)
        layer.requires_grad_(False)
        with autocast("cpu", recipe=RECIPE):
            assert ran(lambda: layer(X)) == 1
            assert ran(lambda: layer(X.clone().requires_grad_())) == 0


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_checkpoint_computes_in_its_forward_what_it_will_record(layer, ran, reentrant, frozen):
    layer.requires_grad_(not frozen)
    x = X.clone().requires_grad_()
    with torch.enable_grad(), autocast("cpu", recipe=RECIPE):
        assert ran(lambda: checkpoint(layer, x, use_reentrant=reentrant).sum().backward()) == 0


def test_a_snapshot_takes_it_to_another_thread(layer, ran, in_thread):
    with autocast("cpu", recipe=RECIPE):
        snapshot = polycast.capture()
    with torch.inference_mode():
        assert in_thread(lambda: ran(lambda: snapshot.wrap(torch.no_grad()(layer))(X))) == 1
    with autocast("cpu"):
        plain = polycast.capture()
    with autocast("cpu", recipe=RECIPE), plain.apply():
        assert ran(lambda: layer(X)) == 0


def test_a_rule_for_a_module_may_be_a_recipe(layer, ran, tmp_path):
    model = nn.Sequential(layer, nn.Linear(8, 8))
    policy = Policy(modules={"0": "none", "1": RECIPE})
    policy.save(tmp_path / "policy.toml")
    assert Policy.load(tmp_path / "policy.toml") == policy
    with polycast.apply_policy(model, tmp_path / "policy.toml"):
        with autocast("cpu"):
            assert ran(lambda: model(X)) == 1
        with autocast("cpu", recipe=RECIPE):
            assert ran(lambda: model(X)) == 1
        assert ran(lambda: model(X)) == 0
    with autocast("cpu", recipe=RECIPE), polycast.apply_policy(model, Policy(modules={"0": "fp32"})):
        assert ran(lambda: model(X)) == 1
        assert layer(X).dtype is torch.float32


def test_a_device_that_cannot_compute_by_it_runs_in_the_fast_dtype_and_says_so(layer, ran):
    with pytest.warns(
        polycast.errors.RecipeDisabledWarning, match=r"scales='tensor'\) cannot be used on cpu: no kernels for rounded:"
    ):
        region = autocast("cpu", recipe="rounded:tensor")
    assert issubclass(polycast.errors.RecipeDisabledWarning, polycast.errors.AutocastDisabledWarning)
    with autocast("cpu", recipe=RECIPE), region:
        assert layer(X).dtype is torch.bfloat16
        assert ran(lambda: layer(X)) == 0


def test_the_reason_of_one_that_is_available_is_told_once(engine, other_cpu):
    answer = polycast.plugin.Availability(True, f"experimental ({engine})")
    other_cpu(recipe_availability=lambda recipe: answer, low_bit_kernels=lambda recipe: {})
    with pytest.warns(UserWarning, match=r"Rounded\(min_size=1\) on cpu: experimental"):
        autocast("cpu", recipe=RECIPE)
    autocast("cpu", recipe=RECIPE)


@pytest.mark.parametrize(("recipe", "error"), [(8, TypeError), ("int9", ValueError), (Rounded, TypeError)])
def test_an_invalid_recipe_raises(engine, recipe, error):
    with pytest.raises(error, match="recipe"):
        autocast("cpu", recipe=recipe)


def test_the_changes_to_torch_of_a_recipe_are_made_in_its_regions_until_uninstalled(layer, monkeypatch):
    feature = polycast.plugin.Feature("of a recipe", "", ())
    monkeypatch.setattr(Rounded, "features", [feature])
    region = autocast("cpu", recipe=RECIPE)
    with autocast("cpu", policy={"mm": "fp32"}):
        assert not feature.is_made()
    for _ in range(2):
        with region:
            assert feature.is_made()
        polycast.uninstall()
        assert not feature.is_made()


class Doubles(polycast.plugin.LowBitKernel):
    """A linear of nobody's, which can be recognized."""

    def prepack(self, weight):
        return (weight.detach().clone(),)

    def run(self, prepared, x, weight, bias):
        return torch.full((*x.shape[:-1], len(weight)), 2.0, dtype=torch.get_autocast_dtype("cpu"))


class Backend(CpuBackend):
    def recipe_availability(self, recipe):
        return polycast.plugin.Availability(True)

    def low_bit_kernels(self, recipe):
        return {"aten::linear": Doubles()}


@pytest.fixture
def model():
    polycast.plugin.register_backend(Backend())
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))


def run(model, rules, call=None, **settings):
    """Return the dtype of the output, and whether the recipe computed it."""
    x = torch.ones(2, 4)
    with torch.no_grad(), polycast.apply_policy(model, Policy(modules=rules)), autocast("cpu", **settings):
        output = (call or model)(x)
    return output.dtype, bool(output.eq(2).all())


RULES = [
    *(({"1": around, "1.0": RECIPE}, {}, (torch.bfloat16, True)) for around in ("fp32", "off")),
    *(({"1": around, "1.0": "none"}, {"recipe": RECIPE}, (torch.bfloat16, False)) for around in ("fp32", "off")),
    *(({"1": around, "1.0": "none"}, {"dtype": torch.float16}, (torch.float16, False)) for around in ("fp32", "off")),
    ({"1": "fp32"}, {"recipe": RECIPE}, (torch.float32, False)),
]


@pytest.mark.parametrize(("rules", "settings", "expected"), RULES)
def test_a_recipe_or_none_holds_inside_a_module_that_autocast_is_off_in(model, engine, rules, settings, expected):
    assert run(model, rules, **settings) == expected


def test_compiled_code_has_the_recipes_of_rules(model, engine):
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    rules = {"1": "fp32", "1.0": RECIPE}
    assert run(model, rules, compiled) == run(model, rules) == (torch.bfloat16, True)
    torch.compiler.reset()


def test_a_rule_with_a_recipe_switches_no_region_on(model, engine):
    with torch.no_grad(), polycast.apply_policy(model, Policy(modules={"1.0": RECIPE})):
        assert model(torch.ones(2, 4)).dtype is torch.float32
        with autocast("cpu", enabled=False):
            assert model(torch.ones(2, 4)).dtype is torch.float32


def test_a_refresh_reaches_the_rules_of_a_model(model, engine):
    backend, x = polycast.plugin.get_backend("cpu"), torch.ones(2, 4)
    with torch.no_grad(), polycast.apply_policy(model, Policy(modules={"": RECIPE})):
        for available in (True, False, True):
            answer = polycast.plugin.Availability(available, "" if available else "unplugged")
            vars(backend).update(recipe_availability=lambda recipe, answer=answer: answer)
            polycast.plugin.refresh("cpu")
            with autocast("cpu"), contextlib.nullcontext() if available else pytest.warns(match="unplugged"):
                assert bool(model(x).eq(2).all()) is available
