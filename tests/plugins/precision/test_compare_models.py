"""``compare`` with models that differ from each other, or are not in float32."""

import pytest
import torch
from tests.plugins.models import Defined
from torch import nn
from torch.utils.checkpoint import checkpoint

import polycast

from .planted_gradients import mean_square


def net(width=8, outputs=4):
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, outputs))


@pytest.mark.parametrize("other", [{"width": 12}, {"outputs": 3}])
def test_models_whose_layers_have_other_shapes_can_be_compared(engine, other):
    comparison = polycast.compare(net(), torch.randn(5, 6), reference=net(**other), enabled=False, loss=mean_square)
    errors = {each.name: each.own.relative for each in comparison.modules}
    assert errors["2"] == float("inf")
    assert errors["1"] == errors["(loss)"] == 0
    assert {each.own for each in comparison.gradients if each.name in ("2.weight", "2.bias")} == {None}


@pytest.mark.parametrize("model", ["reference", "tested"])
def test_an_exception_of_a_model_itself_is_raised(model):
    wrong = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(9, 4))
    models = (wrong, net()) if model == "reference" else (net(), wrong)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        polycast.compare(models[1], torch.randn(5, 6), reference=models[0])


@pytest.mark.parametrize("loss", [None, mean_square])
def test_a_model_in_the_fast_dtype_can_be_compared(engine, loss):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).bfloat16()
    comparison = polycast.compare(model, torch.randn(5, 6).bfloat16(), loss=loss)
    assert comparison.outputs["output"].relative < 0.02
    assert {each.own.relative for each in comparison.modules} == {0.0}


def test_a_gradient_of_rounding_errors_only_does_not_come_first():
    """The gradient of a bias before a batch norm is zero, but for rounding."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    gradients = polycast.compare(model, torch.randn(64, 16), loss=mean_square).gradients
    bias = next(each for each in gradients if each.name == "0.bias")
    assert bias.total.relative > 100
    assert bias.adds < 0.1
    assert gradients[0].name != "0.bias"


def test_a_reentrant_checkpoint_does_not_warn():
    """A part gets no gradients when only those of the module around it are computed again."""

    def forward(self, x):
        return self.last(checkpoint(self.second, self.first(x), use_reentrant=True))

    model = Defined(forward, first=nn.Linear(6, 8), second=nn.Linear(8, 8), last=nn.Linear(8, 4))
    gradients = polycast.compare(model, torch.randn(5, 6), enabled=False, loss=mean_square).gradients
    assert {each.name for each in gradients if each.parameter} == {
        f"{name}.{parameter}" for name in ("first", "second", "last") for parameter in ("weight", "bias")
    }
    assert {each.total.relative for each in gradients} == {0.0}


@pytest.mark.parametrize("tuned", [False, True])
def test_a_model_that_another_call_compares_is_refused(in_thread, tuned):
    model, x, found = net(), torch.randn(5, 6), []

    def compare_part():
        if tuned:
            polycast.tune(model[0], x, tolerance=1.0)
        else:
            polycast.compare(model[0], x)

    def other():
        with pytest.raises(RuntimeError, match="Linear is in use by another call of polycast.compare or polycast.tune"):
            compare_part()
        found.append(polycast.compare(net(), x))

    def loss(output):
        if not found:
            in_thread(other)
        return mean_square(output)

    polycast.compare(model, x, loss=loss)
    assert found
    compare_part()
