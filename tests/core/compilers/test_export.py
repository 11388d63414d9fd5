"""torch.export: an exported program holds a region as it holds torch.autocast."""

import functools

import pytest
import torch

import polycast
from polycast import CastPolicy

from .test_compile import SHAPES, without_comments

pytestmark = pytest.mark.usefixtures("engine")

ways = pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])


class Model(torch.nn.Module):
    def __init__(self, shape, region):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)
        self.function = shape(functools.partial(region, cache_enabled=False))

    def forward(self, x):
        return self.function(x, self.linear)


@ways
@pytest.mark.parametrize("shape", SHAPES)
def test_the_program_is_that_of_torch_autocast(strict, shape):
    def graphs(region):
        program = torch.export.export(Model(shape, region), (torch.randn(2, 4),), strict=strict)
        return without_comments(program.graph_module.print_readable(print_output=False))

    ours = graphs(polycast.autocast)
    assert "wrap_with_autocast('cpu', torch.bfloat16, True, False" in "".join(ours)
    assert ours == graphs(torch.autocast)


class Product(torch.nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.settings = settings

    def forward(self, x):
        with polycast.autocast("cpu", **self.settings):
            return x @ x


@pytest.mark.parametrize("settings", [{"policy": {"aten::mm": CastPolicy.FP32}}, {"recipe": "rounded"}], ids=str)
def test_a_policy_or_a_recipe_is_refused_strictly(settings):
    with pytest.raises(torch._dynamo.exc.Unsupported, match="torch's autocast, which has no policies or recipes"):
        torch.export.export(Product(**settings), (torch.randn(4, 4),), strict=True)


def refused(model):
    """Return why the export of a model that has a policy is refused."""
    with pytest.raises(RuntimeError) as caught:
        torch.export.export(model, (torch.randn(4, 4),), strict=False)
    assert polycast.autocast_nesting("cpu") == 0
    return str(caught.value)


def test_a_policy_is_refused_not_strictly():
    assert refused(Product(policy={"aten::mm": CastPolicy.FP32})).startswith(
        "torch.export: a region with policy= cannot be exported, because programs hold torch's autocast only. "
        "Leave out policy=, or cast in the model what has to run in another dtype."
    )


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
    assert all(map(torch.equal, exported, expected))


def test_a_snapshot_with_a_policy_is_refused_with_the_reason():
    with polycast.autocast("cpu", policy={"aten::mm": "fp32"}):
        snapshot = polycast.capture()

    class Applied(torch.nn.Module):
        def forward(self, x):
            with polycast.autocast("cpu"), snapshot.apply():
                return x @ x

    assert "a region with policy= cannot be exported" in refused(Applied())
