"""Int8 convolutions in regions: what they compute, and the results and errors of degenerate sizes."""

import random
import warnings

import pytest
import torch
import torch.nn.functional as F

import polycast

from .matmul_kinds import INT8

pytestmark = pytest.mark.skipif(not INT8, reason=f"no int8 here: {INT8.reason}")


def outcome(recipe, convolution, *arguments):
    """Return the result of a convolution in a region, and the class of what it raises."""
    with torch.no_grad(), polycast.autocast("cpu", recipe=recipe):
        try:
            return convolution(*arguments), None
        except Exception as error:
            return None, type(error)


def assert_as_without_a_recipe(convolution, x, weight, *rest):
    weight = torch.nn.Parameter(weight)
    expected, raised = outcome("none", convolution, x, weight, *rest)
    recipe = polycast.Int8(ops=(convolution.__name__,), min_size=0)
    actual, its = outcome(recipe, convolution, x, weight, *rest)
    assert its is raised
    if expected is not None:
        assert (actual.shape, actual.stride(), actual.dtype) == (expected.shape, expected.stride(), expected.dtype)
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.3)


DEGENERATE = {
    "no stride": (None, []),
    "three strides": (None, [1, 1, 1]),
    "padding that overflows": (None, 1, 2**62),
    "padding that nothing has memory for": (None, 2**31, 2**31),
    "another name of a padding": (None, 1, "full"),
    "groups of 0": (None, 1, 0, 1, 0),
}


@pytest.mark.parametrize("rest", DEGENERATE.values(), ids=DEGENERATE)
def test_arguments_out_of_range_give_the_result_or_the_error_that_they_give_without_a_recipe(rest):
    assert_as_without_a_recipe(F.conv2d, torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), *rest)


@pytest.mark.parametrize("convolution", [F.conv1d, F.conv2d], ids=["conv1d", "conv2d"])
def test_any_sizes_give_the_result_or_the_error_that_they_give_without_a_recipe(convolution):
    pick, is_conv1d = random.Random(0).choice, convolution is F.conv1d
    for _ in range(400):
        channels, features = pick((0, 1, 3, 8) if is_conv1d else (0, 1, 3)), pick((0, 1, 4, 17))
        size = [pick((0, 1, 3, 6))] if is_conv1d else [pick((0, 1, 2, 5)), pick((0, 1, 3, 6))]
        batch = pick(([], [0], [1], [2]))
        stride, padding, dilation = (
            pick((default, [pick(numbers)], [pick(numbers), pick(numbers)]))
            for default, numbers in ((1, (0, 1, 2, -1)), (pick(("same", "valid")), (0, 1, 2, -1)), (1, (0, 1, 2)))
        )
        x = torch.randn(*batch, channels, *size)
        weight = torch.randn(features, channels, *(pick((0, 1, 2, 3)) for _ in size))
        if is_conv1d and batch and pick((True, False)):
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        rest = [pick((None, torch.randn(features))), stride, padding, dilation]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths")
            assert_as_without_a_recipe(convolution, x, weight, *rest, *([pick((1, 1, 2))] if is_conv1d else []))


LAYERS = {
    "conv1d": (torch.nn.Conv1d(8, 16, 3, padding=1), (2, 8, 20)),
    "conv1d.padding": (torch.nn.Conv1d(8, 16, 3, padding="same"), (2, 8, 20)),
    "conv2d": (torch.nn.Conv2d(96, 96, 3, groups=2), (1, 96, 9, 9)),
    "conv2d.padding": (torch.nn.Conv2d(8, 16, 3, padding="same"), (2, 8, 9, 9)),
    "conv2d.padding of valid images": (torch.nn.Conv2d(8, 16, 3, padding="valid"), (2, 8, 9, 9)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_is_computed_by_the_recipe_that_names_it(engine, recipe_counts, name, compiled):
    layer, size = LAYERS[name]
    op = name.partition(" ")[0]
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    recipe = polycast.Int8(ops=(op.partition(".")[0],), min_size=0)
    with torch.no_grad(), recipe_counts() as counts, polycast.autocast("cpu", recipe=recipe):
        expected = layer(torch.ones(size))
        assert torch.equal(run(torch.ones(size)), expected)
    assert {(each.op, each.declined) for each in counts.records()} == {(f"aten::{op}", "")}
