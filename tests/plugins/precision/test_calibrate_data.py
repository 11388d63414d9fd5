"""Data that `calibrate` refuses, or leaves out: without finite values, without rows."""

import re

import pytest
import torch
from torch import nn

import polycast

RECIPE = polycast.Int8(min_size=1)


class Branches(nn.Module):
    """Multiplies one part of its inputs by each layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 24), nn.Linear(32, 24)

    def forward(self, x, y):
        return self.first(x), self.second(y)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_data_without_finite_values_are_refused(value):
    x = torch.full((8, 32), 1.0)
    x[:, 3] = value
    message = (
        "'second.weight' got inf or nan in each row of the activations: check the batches. polycast.observe() names "
        "the op that makes the first of them."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        polycast.calibrate(Branches(), [(torch.randn(8, 32), x)], RECIPE)


def test_rows_with_nan_do_not_matter_beside_others():
    x = torch.randn(8, 32)
    x[:7, 3] = torch.nan
    assert polycast.calibrate(nn.Linear(32, 24), [x], RECIPE).weights[0].error > 0


def test_a_weight_that_is_multiplied_by_no_rows_is_left_out():
    found = polycast.calibrate(Branches(), [(torch.randn(8, 32), torch.randn(0, 32))], RECIPE)
    assert [each.name for each in found.weights] == ["first.weight"]
