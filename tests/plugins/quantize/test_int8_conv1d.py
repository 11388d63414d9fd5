"""The int8 convolution of one axis: that of images with a height of 1, as torch's is."""

import random
import warnings

import pytest
import torch
import torch.nn.functional as F

import polycast
from polycast_plugins.quantize.cpu.int8 import Conv1d, Conv2d

from .low_bit_calls import run_kernel

AVAILABLE = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"no int8 here: {AVAILABLE.reason}")

STEPS = {
    "3": (3, 1, 1, 1),
    "stride": (3, 2, 0, 1),
    "dilation": (4, 1, 2, 3),
    "1": (1, 1, 0, 1),
    "10, stride 5": (10, 5, 3, 1),
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("by_signal", [True, False])
def test_it_has_the_bits_of_the_convolution_of_images_of_height_one(isa, steps, by_signal):
    size, stride, padding, dilation = STEPS[steps]
    x, weight, bias = torch.randn(3, 17, 40), torch.randn(70, 17, size), torch.randn(70)
    actual = run_kernel(Conv1d(by_signal, isa), x, weight, bias, [stride], [padding], [dilation], 1)
    two = Conv2d(by_signal, isa)
    args = (x[:, :, None], weight[:, :, None], bias, [1, stride], [0, padding], [1, dilation], 1)
    assert torch.equal(actual, run_kernel(two, *args)[:, :, 0])
    torch.testing.assert_close(actual, F.conv1d(x, weight, bias, stride, padding, dilation), rtol=0.05, atol=1.0)


def test_groups_have_the_bits_of_those_of_images_of_height_one(isa):
    x, weight, bias = torch.randn(2, 96, 40), torch.randn(192, 48, 5), torch.randn(192)
    actual = run_kernel(Conv1d(True, isa), x, weight, bias, [1], [2], [1], 2)
    args = (x[:, :, None], weight[:, :, None], bias, [1, 1], [0, 2], [1, 1], 2)
    assert torch.equal(actual, run_kernel(Conv2d(True, isa), *args)[:, :, 0])


def test_padding_by_name_is_what_it_is_in_numbers():
    x, weight = torch.randn(2, 8, 19), torch.randn(5, 8, 5)
    kernel, by_name = Conv1d(True), Conv1d(True, overload="padding")
    same, valid = (run_kernel(by_name, x, weight, None, [1], name, [2], 1) for name in ("same", "valid"))
    assert torch.equal(same, run_kernel(kernel, x, weight, None, [1], [4], [2], 1))
    assert torch.equal(valid, run_kernel(kernel, x, weight, None, [1], [0], [2], 1))


def outcome(recipe, *arguments):
    """Return the result of a convolution in a region, and the class of what it raises."""
    with torch.no_grad(), polycast.autocast("cpu", recipe=recipe):
        try:
            return F.conv1d(*arguments), None
        except Exception as error:
            return None, type(error)


def test_any_sizes_give_the_result_or_the_error_that_they_give_without_a_recipe():
    pick = random.Random(0).choice
    for _ in range(400):
        channels, features, kernel = pick((0, 1, 3, 8)), pick((0, 1, 4, 17)), pick((0, 1, 2, 3))
        stride, padding, dilation = (
            pick((default, [pick(numbers)], [pick(numbers), pick(numbers)]))
            for default, numbers in ((1, (0, 1, 2, -1)), (pick(("same", "valid")), (0, 1, 2, -1)), (1, (0, 1, 2)))
        )
        x = torch.randn(*pick(([], [0], [1], [2])), channels, pick((0, 1, 3, 6)))
        if x.dim() == 3 and pick((True, False)):
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        weight = torch.nn.Parameter(torch.randn(features, channels, kernel))
        arguments = (x, weight, pick((None, torch.randn(features))), stride, padding, dilation, pick((1, 1, 2)))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths")
            expected, raised = outcome("none", *arguments)
            actual, its = outcome(polycast.Int8(ops=("conv1d",), min_size=0), *arguments)
        assert its is raised
        if expected is not None:
            assert (actual.shape, actual.stride(), actual.dtype) == (expected.shape, expected.stride(), expected.dtype)
            torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.3)


@pytest.mark.parametrize("padding", ["same", 1])
def test_a_layer_is_computed_by_the_recipe_that_names_it(engine, recipe_counts, padding):
    layer, recipe = torch.nn.Conv1d(8, 16, 3, padding=padding).eval(), polycast.Int8(ops=("conv1d",), min_size=0)
    with torch.no_grad(), recipe_counts() as counts, polycast.autocast("cpu", recipe=recipe):
        layer(torch.randn(2, 8, 20))
    assert [each.declined for each in counts.records()] == [""]


def test_inf_and_nan_leave_other_signals_alone(isa):
    x, weight = torch.randn(3, 8, 20), torch.randn(5, 8, 3).sign()
    clean = x.clone()
    x[1, 3, 4], clean[1] = torch.inf, 0
    actual, without = (run_kernel(Conv1d(False, isa), each, weight, None, [1], [0], [1], 1) for each in (x, clean))
    assert torch.equal(actual[[0, 2]], without[[0, 2]])
    assert torch.equal(actual[1].isfinite(), F.conv1d(x, weight)[1].isfinite())


DECLINED = {
    "its groups have fewer than 48 channels": (torch.randn(2, 8, 9), torch.randn(8, 1, 3), None, [1], [0], [1], 8),
    "the sizes do not fit": (torch.randn(2, 7, 9), torch.randn(5, 8, 3), None, [1], [0], [1], 1),
    "the sizes do not fit ": (torch.randn(2, 8, 9), torch.randn(5, 8, 3), None, [1, 1], [0], [1], 1),
    "the images have no elements": (torch.randn(0, 8, 9), torch.randn(5, 8, 3), None, [1], [0], [1], 1),
}


@pytest.mark.parametrize("reason", DECLINED)
def test_what_is_declined_has_a_reason(reason):
    assert Conv1d(True).unsupported_reason(*DECLINED[reason]) == reason.strip()
