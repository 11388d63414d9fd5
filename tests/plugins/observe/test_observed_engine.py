"""What the engine does while it is observed: recipes ask Python, and casts are counted."""

import pytest
import torch
from tests.plugins.quantize.conftest import int8_operators  # noqa: F401  # a fixture
from tests.plugins.quantize.int8_linears import X, run
from torch import nn

import polycast

pytestmark = pytest.mark.parametrize("engine", ["native"], indirect=True)  # the reference engine cannot be observed


@pytest.mark.usefixtures("int8_operators", "no_grad")
def test_python_is_asked_for_each_call_by_a_recipe(engine, asked):
    layer = nn.Linear(8, 8).requires_grad_(False)
    run(layer, X)
    before = len(asked)
    for count in (1, 2):
        with polycast.observe():
            run(layer, X)
        assert len(asked) - before >= count
    count = len(asked)
    run(layer, X)  # observing has made the engine forget
    assert len(asked) - count == 1
    run(layer, X)
    assert len(asked) - count == 1


def test_casts_of_an_encoder_layer_that_a_region_uses_again_are_cached(engine):
    module, x = (
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().requires_grad_(False),
        torch.randn(3, 7, 16),
    )
    with torch.no_grad(), polycast.autocast("cpu"):
        for _ in range(3):
            module(x)
        with polycast.observe() as seen:
            module(x)
    assert sum(each.hits for each in seen.casts) >= 2  # at least the two linears between the norms
    with torch.no_grad(), polycast.autocast("cpu"), polycast.observe() as seen:
        module(x)
    assert sum(each.hits for each in seen.casts) == 0
