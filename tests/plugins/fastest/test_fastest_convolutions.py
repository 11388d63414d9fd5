"""The prices of convolutions for the recipe "fastest"."""

from dataclasses import replace

import pytest
import torch

from polycast import DeviceProfile
from polycast_plugins.fastest.choose_way import Conversions, Way, choose, seconds_of
from polycast_plugins.fastest.measurement import Measurement
from polycast_plugins.fastest.workloads import workload_of

KINDS = ("conv2d", "small_conv2d", "depthwise_conv2d")


def workload_of_shapes(x, weight, groups=1):
    axes = len(weight) - 2
    args = torch.empty(x), torch.empty(weight), None, *([each] * axes for each in (1, 0, 1)), groups
    return workload_of(f"aten::conv{axes}d", args)


def chosen(profile, workload):
    return choose(profile, torch.bfloat16, workload, Conversions(0, 0, 0), ())


def profile_with(times):
    """Return a profile, given the microseconds in float32 and bfloat16 by op, rows and size."""
    measurements = [
        Measurement(*case, way, microseconds / 1e6, size)
        for (*case, size), given in times.items()
        for way, microseconds in zip(("float32", "bfloat16"), given, strict=True)
    ]
    return DeviceProfile("cpu", "a processor", 2, {}, {}, tuple(measurements), 1e10)


@pytest.fixture
def profile():
    """Return a profile in which float32 is faster for the least work, and bfloat16 for more."""
    return profile_with({("conv2d", 400, 2000): (80, 100), ("conv2d", 800, 40000): (580, 340)})


PRICES = {
    "measured": (400, 2000, 80),
    "the work of the least": (8, 100_000, 80),
    "less": (1, 100, 80),
    "between, of few rows": (10, 1_640_000, 330),
    "between, of many rows": (16_400, 1000, 330),
    "more": (800, 80_000, 1160),
}


@pytest.mark.parametrize(("rows", "size", "microseconds"), PRICES.values(), ids=PRICES)
def test_a_convolution_is_priced_by_its_multiplications(profile, rows, size, microseconds):
    assert seconds_of(profile, "conv2d", "float32", rows, size) == pytest.approx(microseconds / 1e6)


def test_small_convolutions_are_priced_by_rows_and_size():
    times = {1: (10, 50), 9: (70, 50), 16: (30, 50)}
    profile = profile_with(
        {("small_conv2d", rows, size): each for size in (2000, 40_000) for rows, each in times.items()}
    )
    for rows, (of_float32, _) in times.items():
        assert seconds_of(profile, "small_conv2d", "float32", rows, 10_000) == pytest.approx(of_float32 / 1e6)


def test_of_equal_multiplications_the_least_time_counts():
    profile = profile_with({("conv2d", 10, 400): (80, 1), ("conv2d", 400, 10): (60, 1), ("conv2d", 20, 200): (70, 1)})
    assert seconds_of(profile, "conv2d", "float32", 40, 100) == pytest.approx(60e-6)


@pytest.mark.parametrize(("channels", "pixels", "way"), [(16, 4, Way.FLOAT32), (256, 28, Way.FAST)])
def test_the_way_depends_on_the_multiplications(profile, channels, pixels, way):
    workload = workload_of_shapes((2, channels, pixels + 2, pixels + 2), (channels, channels, 3, 3))
    assert chosen(profile, workload).way is way


@pytest.mark.parametrize(
    ("x", "weight", "groups", "op"),
    [
        ((2, 16, 8, 8), (8, 16, 3, 3), 1, "conv2d"),
        ((1, 16, 8, 8), (8, 16, 3, 3), 1, "small_conv2d"),
        ((16, 8, 8), (8, 16, 3, 3), 1, "small_conv2d"),
        ((1, 512, 1, 1), (512, 512, 1, 1), 1, "small_conv2d"),
        ((1, 5, 64, 64), (8, 5, 3, 3), 1, "small_conv2d"),
        ((1, 6, 64, 64), (8, 6, 3, 3), 1, "conv2d"),
        ((1, 16, 8, 8), (8, 16, 4, 4), 1, "conv2d"),
        ((1, 16, 8, 8), (8, 16, 4, 3), 1, "small_conv2d"),
        ((1, 16, 80), (8, 16, 9), 1, "small_conv2d"),
        ((1, 4, 6, 6, 6), (8, 4, 3, 3, 3), 1, "small_conv2d"),
        ((2, 16, 8, 8), (16, 1, 3, 3), 16, "depthwise_conv2d"),
        ((1, 16, 80), (16, 1, 9), 16, "depthwise_conv2d"),
        ((1, 16, 8, 8), (16, 4, 3, 3), 4, "conv2d"),
        ((0, 16, 8, 8), (8, 16, 3, 3), 1, None),
    ],
)
def test_convolutions_with_kernels_of_their_own_are_priced_apart(x, weight, groups, op):
    workload = workload_of_shapes(x, weight, groups)
    assert op == (None if workload is None else workload.op)


@pytest.mark.parametrize("op", KINDS)
def test_a_profile_without_a_kind_has_the_prices_of_others(profile, op):
    one = workload_of_shapes((2, 16, 20, 20), (16, 16, 3, 3))._replace(op=op)
    assert chosen(profile, one) == chosen(profile, one._replace(op="conv2d"))
    assert chosen(replace(profile, measurements=()), one).way is Way.FAST


def test_a_kind_has_its_own_prices():
    profile = profile_with({("conv2d", 100, 1000): (100, 50), ("small_conv2d", 36, 1152): (30, 50)})
    ways = [chosen(profile, workload_of_shapes((batch, 16, 8, 8), (8, 16, 3, 3))).way for batch in (1, 2)]
    assert ways == [Way.FLOAT32, Way.FAST]
