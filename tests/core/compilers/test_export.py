"""torch.export: an exported program holds a region as it holds torch.autocast."""

import pytest
import torch

import polycast
from polycast import CastPolicy

pytestmark = pytest.mark.usefixtures("engine")

ways = pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])


class Model(torch.nn.Module):
    """A model with a region in its forward, made there or held; nested, and one that is disabled."""

    def __init__(self, region, held):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)
        make = {"dtype": torch.bfloat16, "cache_enabled": False}
        self.make = (lambda: kept) if held else (lambda: region("cpu", **make))
        self.disabled = lambda: region("cpu", enabled=False, **make)
        kept = region("cpu", **make)

    def forward(self, x):
        y = self.linear(x)
        with self.make():
            y = self.linear(y)
            with self.disabled():
                z = self.linear(x)
            y = self.linear(y)
        return y, z


class Decorated(torch.nn.Module):
    def __init__(self, region):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)
        self.body = region("cpu", dtype=torch.bfloat16, cache_enabled=False)(lambda x: self.linear(x))

    def forward(self, x):
        return self.body(x), self.linear(x)


MODELS = {
    "made inside": lambda region: Model(region, held=False),
    "held": lambda region: Model(region, held=True),
    "decorated": Decorated,
}


def printed(program):
    """Return all graphs of a program, those of its regions included."""
    return program.graph_module.print_readable(print_output=False)


@ways
@pytest.mark.parametrize("model", MODELS)
def test_the_program_is_that_of_torch_autocast(strict, model):
    x = torch.randn(2, 4)
    ours, theirs = (
        torch.export.export(MODELS[model](region), (x,), strict=strict)
        for region in (polycast.autocast, torch.autocast)
    )
    assert "wrap_with_autocast('cpu', torch.bfloat16, True, False" in printed(ours)
    assert _without_paths(printed(ours)) == _without_paths(printed(theirs))


def _without_paths(text):
    return [line for line in text.splitlines() if not line.lstrip().startswith("#")]


class WithPolicy(torch.nn.Module):
    def forward(self, x):
        with polycast.autocast("cpu", policy={"aten::mm": CastPolicy.FP32}):
            return x @ x


class WithRecipe(torch.nn.Module):
    def forward(self, x):
        with polycast.autocast("cpu", recipe="rounded"):
            return x @ x


@pytest.mark.parametrize("model", [WithPolicy, WithRecipe])
def test_a_policy_or_a_recipe_is_refused_strictly(model):
    with pytest.raises(torch._dynamo.exc.Unsupported, match="torch's autocast, which has no policies or recipes"):
        torch.export.export(model(), (torch.randn(4, 4),), strict=True)


def test_a_policy_is_refused_not_strictly():
    with pytest.raises(RuntimeError) as caught:
        torch.export.export(WithPolicy(), (torch.randn(4, 4),), strict=False)
    assert str(caught.value).startswith(
        "torch.export: a region with policy= cannot be exported, because programs hold torch's autocast only. "
        "Leave out policy=, or cast in the model what has to run in another dtype."
    )
    assert polycast.autocast_nesting("cpu") == 0


class WithFunction(torch.nn.Module):
    """A model that leaves its region in an autograd.Function, a snapshot and a generator."""

    def __init__(self):
        super().__init__()
        self.outside = polycast.capture()

    def forward(self, x):
        with polycast.autocast("cpu", torch.bfloat16):
            rows = self.outside.wrap(lambda: (yield x @ x))()
            with self.outside.apply():
                y = x @ x
            return _Square.apply(x), y, next(rows), x @ x


class _Square(torch.autograd.Function):
    @staticmethod
    @polycast.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        return x @ x


def test_regions_are_left_in_the_program_where_the_model_leaves_them():
    model, x = WithFunction(), torch.randn(4, 4)
    expected = model(x)
    assert [each.dtype for each in expected] == [torch.float32] * 3 + [torch.bfloat16]
    exported = torch.export.export(model, (x,), strict=False).module()(x)
    for ours, theirs in zip(expected, exported, strict=True):
        assert torch.equal(ours, theirs)


def test_a_snapshot_with_a_policy_is_refused_with_the_reason():
    with polycast.autocast("cpu", policy={"aten::mm": "fp32"}):
        snapshot = polycast.capture()

    class Applied(torch.nn.Module):
        def forward(self, x):
            with polycast.autocast("cpu"), snapshot.apply():
                return x @ x

    with pytest.raises(RuntimeError, match="a region with policy= cannot be exported"):
        torch.export.export(Applied(), (torch.randn(4, 4),), strict=False)
    assert polycast.autocast_nesting("cpu") == 0
