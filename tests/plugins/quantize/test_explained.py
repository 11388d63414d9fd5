"""Explain ops of a recipe by `explain_op`."""

import pytest
import torch
from torch import nn

from polycast import Int8, autocast
from polycast.plugin import explain_op

X = torch.ones(2, 8)
pytestmark = pytest.mark.usefixtures("no_grad")


def test_a_recipe_is_explained(engine, int8_kernels):
    layer = nn.Linear(8, 8)
    with autocast("cpu", recipe=Int8(min_size=1)):
        assert "the recipe int8 computes it, or its inputs are cast" in str(explain_op("linear", "cpu"))
        explained = explain_op("linear", "cpu", (X, layer.weight))
        assert (explained.recipe, explained.declined) == ("int8", None)
        assert [argument.is_cast for argument in explained.arguments] == [False, False]
        assert explain_op("linear", "cpu", (X[:, :4], layer.weight[:, :4])).declined is None
        explained = explain_op("linear", "cpu", (X, layer.weight * 1))
        assert "its weight is not a cacheable parameter" in explained.declined
        assert "declines: its weight is not a cacheable parameter" in str(explained)
        odd = nn.Parameter(torch.ones(2, 7))
        assert explain_op("linear", "cpu", (X[:, :7], odd)).declined == "its features are odd in number"
        meta = torch.ones(2, 8, device="meta"), torch.ones(2, 8, device="meta")
        assert explain_op("linear", "cpu", meta).declined is None
        assert explain_op("softmax", "cpu").recipe == ""
    assert explain_op("linear", "cpu", (X, layer.weight), recipe=Int8(min_size=1)).recipe == "int8"
    assert explain_op("linear", "cpu", (X, layer.weight)).recipe == ""
