"""Models whose forward opens regions."""

import copy
import inspect

import pytest
import torch

import polycast
from polycast.integrations.settings import RegionSettings, run_in_regions


@pytest.fixture
def in_regions(layers):
    """Return a model whose ReLU is kept in float32 by the regions that its forward opens."""
    run_in_regions(layers, RegionSettings({"relu": "fp32"}))
    return layers


def test_forward_opens_a_region_inside_an_enabled_one_with_its_dtype(in_regions, dtypes, engine):
    found = dtypes(in_regions)
    with torch.autocast("cpu", torch.float16):
        in_regions(torch.ones(1, 8))
    assert found == [torch.float16, torch.float32, torch.float16]


def test_outside_of_regions_forward_is_unchanged(in_regions, dtypes, engine):
    found = dtypes(in_regions)
    in_regions(torch.ones(1, 8))
    with polycast.autocast("cpu", enabled=False):
        in_regions(torch.ones(1, 8))
    assert found == [torch.float32] * 3


def test_a_copy_computes_with_its_own_weights_in_its_own_regions(in_regions, dtypes, engine):
    copied = copy.deepcopy(in_regions)
    found = dtypes(copied)
    with torch.no_grad(), polycast.autocast("cpu"):
        for parameter in copied.parameters():
            parameter.zero_()
        assert copied(torch.ones(1, 8)) == 0
        assert in_regions(torch.ones(1, 8)) != 0
    assert found == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_the_signature_is_that_of_the_forward(in_regions):
    assert list(inspect.signature(in_regions.forward).parameters) == ["input"]


def test_a_forward_of_the_instance_is_called(layers, engine):
    layers.forward = lambda x: x + 1
    run_in_regions(layers, RegionSettings())
    with polycast.autocast("cpu"):
        assert torch.equal(layers(torch.zeros(2)), torch.ones(2))
