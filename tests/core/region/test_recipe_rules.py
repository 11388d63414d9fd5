"""Module rules that are recipes, inside modules with other rules."""

import contextlib

import pytest
import torch
from tests.core.rounding import Rounded
from torch import nn

import polycast
from polycast import Policy
from polycast_backends.cpu import CpuBackend


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


RECIPE = Rounded(min_size=0)


def run(model, rules, call=None, **settings):
    """Return the dtype of the output, and whether the recipe computed it."""
    x = torch.ones(2, 4)
    with torch.no_grad(), polycast.apply_policy(model, Policy(modules=rules)), polycast.autocast("cpu", **settings):
        output = (call or model)(x)
    return output.dtype, bool(output.eq(2).all())


@pytest.mark.parametrize("around", ["fp32", "off"])
def test_a_recipe_holds_inside_a_module_that_autocast_is_off_in(model, around, engine):
    assert run(model, {"1": around, "1.0": RECIPE}) == (torch.bfloat16, True)


def test_a_module_in_float32_is_not_computed_by_the_recipe_of_the_region(model, engine):
    assert run(model, {"1": "fp32"}, recipe=RECIPE) == (torch.float32, False)


@pytest.mark.parametrize("around", ["fp32", "off"])
def test_none_is_the_fast_dtype_inside_a_module_that_autocast_is_off_in(model, around, engine):
    assert run(model, {"1": around, "1.0": "none"}, recipe=RECIPE) == (torch.bfloat16, False)
    assert run(model, {"1": around, "1.0": "none"}, dtype=torch.float16) == (torch.float16, False)


def test_compiled_code_does_the_same(model, engine):
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    rules = {"1": "fp32", "1.0": RECIPE}
    assert run(model, rules, compiled) == run(model, rules) == (torch.bfloat16, True)
    torch.compiler.reset()


def test_a_recipe_switches_no_region_on(model, engine):
    with torch.no_grad(), polycast.apply_policy(model, Policy(modules={"1.0": RECIPE})):
        assert model(torch.ones(2, 4)).dtype is torch.float32
        with polycast.autocast("cpu", enabled=False):
            assert model(torch.ones(2, 4)).dtype is torch.float32


def test_a_refresh_reaches_the_rules_of_a_model(model, engine):
    backend, x = polycast.plugin.get_backend("cpu"), torch.ones(2, 4)
    with torch.no_grad(), polycast.apply_policy(model, Policy(modules={"": RECIPE})):
        for available in (True, False, True):
            answer = polycast.plugin.Availability(available, "" if available else "unplugged")
            vars(backend).update(recipe_availability=lambda recipe, answer=answer: answer)
            polycast.plugin.refresh("cpu")
            with polycast.autocast("cpu"), contextlib.nullcontext() if available else pytest.warns(match="unplugged"):
                assert bool(model(x).eq(2).all()) is available
