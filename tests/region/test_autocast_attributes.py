"""The attributes of a region that programs may set, as they may with torch's regions."""

import pytest
import torch

import polycast

pytestmark = pytest.mark.usefixtures("engine")


class _Own(polycast.autocast):
    def __init__(self, name):
        super().__init__("cpu")
        self.device, self.fast_dtype, self.name = "cpu", torch.bfloat16, name


def test_a_subclass_may_set_them():
    region = _Own("mine")
    with region:
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    assert (region.device, region.fast_dtype, region.name) == ("cpu", torch.bfloat16, "mine")


def test_they_are_those_of_the_settings_unless_they_were_set():
    region = polycast.autocast("cpu", dtype=torch.float16)
    assert (region.device, region.fast_dtype) == ("cpu", torch.float16)
    region.fast_dtype = torch.bfloat16
    assert region.fast_dtype is torch.bfloat16
    del region.fast_dtype
    assert region.fast_dtype is torch.float16
