"""A plan as another package writes it, which imports nothing but `polycast.plugin`."""

import pytest
import torch

import polycast
from polycast.plugin import Plan, Recipe

X, WEIGHT = torch.randn(2, 8), torch.nn.Parameter(torch.randn(4, 8))
asked = []


class FewRows(Recipe):
    """Compute linear layers in float32 if their input has few rows, and others from the weight's cast."""

    kind = "test-few-rows"
    needs_kernels = False
    plan_class = f"{__name__}:FewRowsPlan"
    ops = ("linear",)
    rows: int = 4


class FewRowsPlan(Plan):
    recipe: FewRows

    def why_no_kernel(self, op):
        return None

    def explain(self, op, args, cache, dtype):
        x, weight, _ = args
        if (reason := self.unsupported_tensor(args, records=False)) is not None:
            return reason
        if self.weight_of(weight) is None:
            return "it has no weight"
        is_float32 = len(x) <= self.recipe.rows
        return self.Computed("float32" if is_float32 else "cast", dtype=torch.float32 if is_float32 else dtype)

    def perform(self, op, args, cache, checked):
        asked.append(op)
        dtype = torch.get_autocast_dtype(self.device_type)
        found = self.INTERCEPTED if self.is_intercepted() else self.explain(op, args, cache, dtype)
        if isinstance(found, str):
            self.notify(op, found)
            return None, None
        self.notify(op, None, found.way)
        if found.dtype is torch.float32:
            return self.in_dtype(op, args, torch.float32).to(dtype), self.FLOAT32
        x, weight, bias = args
        return self.in_dtype(op, (x, self.cast_of(weight, dtype, cache), bias), dtype), None


@pytest.fixture(autouse=True)
def _forget():
    asked.clear()


def linear(x, weight=WEIGHT, **options):
    with torch.no_grad(), polycast.autocast("cpu", recipe=FewRows(), **options):
        return torch.nn.functional.linear(x, weight)


def test_a_call_is_computed_as_the_plan_says(engine):
    assert torch.equal(linear(X), (X @ WEIGHT.t()).bfloat16())
    many = X.repeat(4, 1)
    assert torch.equal(linear(many), torch.nn.functional.linear(many.bfloat16(), WEIGHT.bfloat16()))


def test_a_call_that_the_plan_declines_runs_in_the_fast_dtype(engine):
    product = torch.nn.functional.linear(X.bfloat16(), (WEIGHT * 2).bfloat16())
    assert torch.equal(linear(X, (WEIGHT * 2).detach()), product)


@pytest.mark.parametrize("engine", ["native"], indirect=True)
@pytest.mark.parametrize(("rows", "questions"), [(2, 1), (8, 3)])
def test_an_action_spares_the_native_engine_the_question(engine, rows, questions):
    x = torch.randn(rows, 8)
    for _ in range(3):
        linear(x)
    assert len(asked) == questions


@pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine caches nothing
def test_the_cast_comes_from_the_regions_cache(engine, cache):
    many = X.repeat(4, 1)
    assert torch.equal(linear(many, cache=cache), linear(many, cache=cache))
    assert (cache.stats().entries, cache.stats().hits) == (1, 1)


def test_explain_says_what_the_plan_says(engine):
    with polycast.autocast("cpu", recipe=FewRows()):
        found = polycast.plugin.explain_op("linear", "cpu", (X, WEIGHT))
        declined = polycast.plugin.explain_op("linear", "cpu", (X, WEIGHT * 2))
    assert (found.way, found.declined) == ("float32", None)
    assert declined.declined == "it has no weight"


def test_listeners_are_told_the_way(engine, recipe_counts):
    with recipe_counts() as counts:
        linear(X)
    assert counts == {("cpu", "test-few-rows:float32", "aten::linear", ""): 1}


class Sevens(Recipe):
    """Compute 7, where the operands are in one dtype, as the product of vectors."""

    kind = "test-sevens"
    needs_kernels = False
    plan_class = f"{__name__}:SevensPlan"
    without_policy = frozenset({"aten::dot"})
    ops = ("dot",)


class SevensPlan(Plan):
    def why_no_kernel(self, op):
        return None

    def explain(self, op, args, cache, dtype):
        return self.Computed("seven") if args[0].dtype is args[1].dtype else "the dtypes differ"

    def perform(self, op, args, cache, checked):
        found = self.explain(op, args, cache, None)
        return (None if isinstance(found, str) else torch.tensor(7.0)), None


def test_a_recipe_computes_an_op_that_has_match_and_what_it_declines_is_matched(engine):
    vector = torch.tensor([1.5, -2.0, 0.25])
    x = vector.bfloat16()
    with torch.no_grad(), polycast.autocast("cpu", recipe=Sevens()):
        assert torch.dot(vector, vector) == 7
        declined = torch.dot(vector, x)
        with polycast.autocast("cpu", policy={"dot": "match"}):
            named = torch.dot(vector, vector)
    assert torch.equal(declined, torch.dot(vector, x.float()))
    assert torch.equal(named, torch.dot(vector, vector))
