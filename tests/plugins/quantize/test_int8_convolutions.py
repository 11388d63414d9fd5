"""The int8 convolutions: their error, torch's memory formats, degenerate sizes, inf and nan, unsupported calls."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from polycast import Int8
from polycast_plugins.quantize.cpu.int8 import Conv1d, Conv2d
from polycast_plugins.testing.low_bit import LINEAR_OPS, assert_within

from .low_bit_calls import run_kernel
from .matmul_kinds import INT8

pytestmark = pytest.mark.skipif(not INT8, reason=f"no int8 here: {INT8.reason}")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
ONE = ([1, 1], [0, 0], [1, 1], 1)
PADDED = ([1, 1], [1, 1], [1, 1], 1)


def reference(x, weight, bias, stride, padding, dilation, groups, by_image):
    """Return the convolution in float64 and the error that it may have, from those of its patches' products."""
    batch = x.double()
    patches = F.unfold(batch, weight.shape[2:], dilation, padding, stride).mT
    scales = [(batch[i : i + 1] if by_image else batch).abs().amax() for i in range(len(batch))]
    # A value of the largest magnitude, which no weight is for, gives each patch the scale of its image.
    largest = torch.stack(scales).view(-1, 1, 1).expand(-1, patches.shape[1], 1)
    flat = F.pad(weight.double().flatten(1), (0, 1))
    args = (torch.cat([patches, largest], 2), flat, None)
    _, error = LINEAR_OPS["aten::linear"].within(Int8(), args, random=False)
    expected = F.conv2d(batch, weight.double(), None if bias is None else bias.double(), stride, padding, dilation)
    return expected, error.mT.reshape(expected.shape)


def check(x, weight, bias, *steps, by_image=True, isa=None, dtype=torch.float32):
    actual = run_kernel(Conv2d(by_image, isa), x, weight, bias, *steps, dtype=dtype)
    assert_within(actual, *reference(x, weight, bias, *steps, by_image))
    return actual


STEPS = {
    "3x3": (3, [1, 1], [1, 1], [1, 1]),
    "stride": (3, [2, 1], [0, 1], [1, 1]),
    "dilation": (3, [1, 2], [2, 0], [2, 1]),
    "dilated rows and columns": (2, [1, 1], [1, 2], [2, 3]),
    "1x1": (1, [1, 1], [0, 0], [1, 1]),
    "1x1 stride": (1, [2, 2], [0, 0], [1, 1]),
    "5x5": (5, [1, 1], [2, 2], [1, 1]),
}


@pytest.mark.parametrize(("channels", "features"), [(1, 1), (3, 8), (16, 70), (33, 64)])
def test_convolutions_are_within_the_error(isa, channels, features, subtests):
    dtypes = itertools.cycle(itertools.product(FLOATS, FLOATS))
    for name, (size, *rest) in STEPS.items():
        with subtests.test(steps=name):
            weight, bias = torch.randn(features, channels, size, size), torch.randn(features)
            for by_image, layout in itertools.product((True, False), FORMATS.values()):
                x = torch.randn(3, channels, 9, 11) * torch.tensor([1.0, 5, 0.1]).view(3, 1, 1, 1)
                given, wanted = next(dtypes)
                args = (x.to(given, memory_format=layout), weight.to(given), bias)
                check(*args, *rest, 1, by_image=by_image, isa=isa, dtype=wanted)


def ungrouped(weight, groups):
    """Return the weight of the same convolution without groups, with zeros for the channels of other groups."""
    features, channels, *size = weight.shape
    whole = weight.new_zeros(groups, features // groups, groups, channels, *size)
    for group, part in enumerate(weight.chunk(groups)):
        whole[group, :, group] = part
    return whole.view(features, groups * channels, *size)


WIDTHS = {"48 of 48": (48, 48, 4), "64 of 64": (64, 64, 3), "70 of 50": (50, 70, 3), "128 of 48": (48, 128, 2)}


def check_groups(x, weight, bias, *rest, by_image=True, isa=None):
    """Compare the bits with those of the convolution with zeros between the groups."""
    kernel, (*steps, groups) = Conv2d(by_image, isa), rest
    actual = run_kernel(kernel, x, weight, bias, *steps, groups)
    expected = run_kernel(kernel, x, ungrouped(weight, groups), bias, *steps, 1)
    assert torch.equal(actual, expected)
    assert actual.stride() == expected.stride()


@pytest.mark.parametrize("width", WIDTHS)
def test_groups_have_the_bits_of_the_convolution_with_zeros_between_them(isa, width, subtests):
    channels, features, groups = WIDTHS[width]
    for name, (size, *rest) in STEPS.items():
        with subtests.test(steps=name):
            weight, bias = torch.randn(groups * features, channels, size, size), torch.randn(groups * features)
            for by_image, layout in itertools.product((True, False), FORMATS.values()):
                x = torch.randn(2, groups * channels, 5, 6).to(memory_format=layout)
                check_groups(x, weight, bias, *rest, groups, by_image=by_image, isa=isa)


def test_groups_of_more_patches_than_are_made_at_once_are_right():
    x, weight = torch.randn(3, 192, 30, 30), torch.randn(192, 48, 3, 3)
    for layout in FORMATS.values():
        check_groups(x.to(memory_format=layout), weight, None, *PADDED[:3], 4)


def test_inf_in_a_group_leaves_the_other_groups_and_images_alone(isa):
    x, weight = torch.randn(2, 96, 9, 9), torch.randn(96, 48, 3, 3)
    x[1, 3, 4, 4] = torch.inf
    whole, first = (run_kernel(Conv2d(True, isa), each, weight, None, *ONE[:3], 2) for each in (x, x[:1]))
    assert torch.equal(whole.isfinite(), F.conv2d(x, weight, groups=2).isfinite())
    assert torch.equal(whole[:1], first)


@pytest.mark.slow
def test_more_patches_than_are_made_at_once_are_right():
    check(torch.randn(3, 32, 70, 70), torch.randn(20, 32, 3, 3), None, *PADDED)
    check(torch.randn(2, 3, 60, 70).to(memory_format=torch.channels_last), torch.randn(5, 3, 17, 17), None, *ONE)


LAYOUTS = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(2, 3),
    "slice": lambda x: x[:, :, 1:, ::2],
    "expanded": lambda x: x[:1].expand(4, -1, -1, -1),
}


@pytest.mark.parametrize("sizes", [(8, 9, 9, 3), (1, 9, 9, 3), (8, 1, 1, 1), (8, 9, 9, 1)], ids=str)
def test_the_result_has_the_strides_that_torch_gives_it(sizes, subtests):
    for images, weights in itertools.product(LAYOUTS, LAYOUTS):
        with subtests.test(images=images, weights=weights):
            channels, height, width, size = sizes
            x = LAYOUTS[images](torch.randn(4, channels, height + 1, 2 * width))
            weight = LAYOUTS[weights](torch.randn(4, channels, size + 1, 2 * size))
            actual = check(x, weight, None, *PADDED)
            assert actual.stride() == F.conv2d(x.bfloat16(), weight.bfloat16(), None, 1, 1).stride()


def test_one_number_may_stand_for_both_axes_and_an_image_for_a_batch():
    x, weight = torch.randn(8, 9, 9), torch.randn(5, 8, 3, 3)
    kernel = Conv2d(True)
    expected = run_kernel(kernel, x[None], weight, None, [2, 2], [1, 1], [1, 1], 1)[0]
    assert torch.equal(run_kernel(kernel, x, weight, None, [2], [1], (1,), 1), expected)


@pytest.mark.parametrize(
    ("kind", "sizes", "dilation", "same"),
    [(Conv2d, (9, 10, 3, 5), [2, 1], [2, 2]), (Conv1d, (19, 5), [2], [4])],
    ids=["conv2d", "conv1d"],
)
def test_padding_by_name_is_what_it_is_in_numbers(kind, sizes, dilation, same):
    axes = len(dilation)
    x, weight, ones = torch.randn(2, 8, *sizes[:axes]), torch.randn(5, 8, *sizes[axes:]), [1] * axes
    for name, padding in (("same", same), ("valid", [0] * axes)):
        by_name = run_kernel(kind(True, overload="padding"), x, weight, None, [1], name, dilation, 1)
        assert torch.equal(by_name, run_kernel(kind(True), x, weight, None, ones, padding, dilation, 1))


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize(("size", "dilation"), [((2, 2), (1, 1)), ((4, 3), (1, 2)), ((2, 4), (3, 1)), ((1, 2), (1, 1))])
def test_same_padding_of_an_even_kernel_pads_more_after_the_image(isa, layout, size, dilation):
    x, weight = torch.randn(2, 8, 9, 10).to(memory_format=FORMATS[layout]), torch.randn(5, 8, *size)
    above, left = ((step * (length - 1)) // 2 for step, length in zip(dilation, size, strict=True))
    padded = F.pad(x, (left, dilation[1] * (size[1] - 1) - left, above, dilation[0] * (size[0] - 1) - above))
    kernel, by_name = Conv2d(True, isa), Conv2d(True, isa, overload="padding")
    actual = run_kernel(by_name, x, weight, None, [1, 1], "same", list(dilation), 1)
    assert torch.equal(actual, run_kernel(kernel, padded, weight, None, [1, 1], [0, 0], list(dilation), 1))
    assert actual.shape[2:] == x.shape[2:]
    x[0, 3, 8, 9] = torch.inf
    actual = run_kernel(by_name, x, weight, None, [1, 1], "same", list(dilation), 1)
    assert not actual[0].isfinite().all()
    assert actual[1].isfinite().all()


@pytest.mark.parametrize("layout", FORMATS)
def test_inf_and_nan_come_to_what_they_come_to_in_bfloat16_and_leave_other_images_alone(isa, layout, subtests):
    for value in [torch.inf, -torch.inf, torch.nan]:
        with subtests.test(value=value):
            x, weight = torch.randn(3, 8, 9, 9).to(memory_format=FORMATS[layout]), torch.randn(5, 8, 3, 3)
            weight = weight.sign() * (weight.abs() + 0.1)
            clean = x.clone()
            x[1, 3, 4, 4], clean[1] = value, 0
            kernel = Conv2d(False, isa)
            actual, without = (run_kernel(kernel, each, weight, torch.ones(5), *ONE) for each in (x, clean))
            expected = F.conv2d(x, weight, torch.ones(5))[1]
            assert torch.equal(actual[[0, 2]], without[[0, 2]])
            assert torch.equal(actual[1].isnan(), expected.isnan())
            torch.testing.assert_close(actual[1].nan_to_num(0), expected.nan_to_num(0), rtol=0.02, atol=0.3)


def test_images_of_zeros_give_the_bias():
    bias = torch.randn(5)
    result = run_kernel(Conv2d(True), torch.zeros(2, 8, 9, 9), torch.randn(5, 8, 3, 3), bias, *ONE)
    assert torch.equal(result, bias.view(1, 5, 1, 1).expand(2, 5, 7, 7))


def test_a_weight_with_nan_is_not_packed():
    weight = torch.randn(5, 8, 3, 3)
    weight[4, 7, 2, 2] = torch.nan
    assert Conv2d(True).prepack(weight) is None


X, WEIGHT, W = torch.randn(2, 8, 9, 9), torch.randn(5, 8, 3, 3), torch.randn(1, 96, 5, 5)
SIGNALS, OF_SIGNALS = torch.randn(2, 8, 9), torch.randn(5, 8, 3)
ONE_STEP = ([1], [0], [1], 1)
DECLINED = {
    "its groups have fewer than 48 channels": [
        (X, torch.randn(8, 1, 3, 3), None, *ONE[:3], 8),
        (W, torch.randn(94, 48, 1, 1), None, *ONE[:3], 2),
        (SIGNALS, torch.randn(8, 1, 3), None, *ONE_STEP[:3], 8),
    ],
    "the sizes do not fit": [
        (W, torch.randn(97, 48, 1, 1), None, *ONE[:3], 2),
        (X, WEIGHT, None, *ONE[:3], 2),
        (X, WEIGHT, None, *ONE[:3], 0),
        (X, torch.randn(5, 7, 3, 3), None, *ONE),
        (X, torch.randn(5, 8, 10, 3), None, *ONE),
        (X, WEIGHT, None, [0, 1], *ONE[1:]),
        (X[0, 0], WEIGHT, None, *ONE),
        (SIGNALS[:, 1:], OF_SIGNALS, None, *ONE_STEP),
        (SIGNALS, OF_SIGNALS, None, [1, 1], *ONE_STEP[1:]),
    ],
    "the bias is not a vector of the output channels": [(X, WEIGHT, torch.randn(1), *ONE)],
    "the images have no elements": [(X[:0], WEIGHT, None, *ONE), (SIGNALS[:0], OF_SIGNALS, None, *ONE_STEP)],
    "the padding is much larger than the images": [(X, WEIGHT, None, [1, 1], [2**20, 0], [1, 1], 1)],
    "the weight has no elements": [(X, WEIGHT[:0], None, *ONE)],
    "its sums have more than 65536 terms, which may not fit 32 bits": [
        (torch.ones(1, 1025, 8, 8), torch.ones(1, 1025, 8, 8), None, *ONE)
    ],
}


@pytest.mark.parametrize("reason", DECLINED)
def test_what_is_declined_has_a_reason(reason):
    for x, weight, *rest in DECLINED[reason]:
        kind = Conv1d if weight.dim() == 3 else Conv2d
        assert kind(True).unsupported_reason(x, weight, *rest) == reason


# ---- Of one axis.


def run_on_signals(x, weight, bias, *steps, by_signal=True, isa=None):
    """Return the convolution of signals, whose bits are those of the convolution of images of height one."""
    stride, padding, dilation, groups = steps
    actual = run_kernel(Conv1d(by_signal, isa), x, weight, bias, [stride], [padding], [dilation], groups)
    args = (x[:, :, None], weight[:, :, None], bias, [1, stride], [0, padding], [1, dilation], groups)
    of_images = run_kernel(Conv2d(by_signal, isa), *args)[:, :, 0]
    torch.testing.assert_close(actual, of_images, rtol=0, atol=0, equal_nan=True)
    return actual


@pytest.mark.parametrize("steps", [(3, 1, 1, 1), (3, 2, 0, 1), (4, 1, 2, 3), (1, 1, 0, 1), (10, 5, 3, 1)], ids=str)
@pytest.mark.parametrize("by_signal", [True, False])
def test_signals_are_convolved_as_images_of_height_one(isa, steps, by_signal):
    size, *rest = steps
    x, weight, bias = torch.randn(3, 17, 40), torch.randn(70, 17, size), torch.randn(70)
    actual = run_on_signals(x, weight, bias, *rest, 1, by_signal=by_signal, isa=isa)
    torch.testing.assert_close(actual, F.conv1d(x, weight, bias, *rest), rtol=0.05, atol=1.0)


def test_groups_of_signals_and_signals_with_inf_are_convolved_as_images_of_height_one(isa):
    run_on_signals(torch.randn(2, 96, 40), torch.randn(192, 48, 5), torch.randn(192), 1, 2, 1, 2, isa=isa)
    x = torch.randn(3, 8, 20)
    x[1, 3, 4] = torch.inf
    run_on_signals(x, torch.randn(5, 8, 3).sign(), None, 1, 0, 1, 1, by_signal=False, isa=isa)


# ---- Operators.


IMAGES, FILTERS = torch.randn(2, 8, 9, 9), torch.randn(5, 8, 3, 3)
CALLS = {
    "conv1d": (IMAGES[0], torch.randn(4, 9, 3), torch.randn(4), [2], [1], [1], 1),
    "conv1d of one signal": (IMAGES[0, 0], torch.randn(4, 9, 3), None, [1], [0], [2], 1),
    "conv1d of channels in order": (IMAGES[0].transpose(1, 2), torch.randn(4, 9, 3), None, [1], [0], [1], 1),
    "conv1d.padding": (IMAGES[0], torch.randn(4, 9, 4), None, [1], "same", [1], 1),
    "conv2d": (IMAGES, FILTERS, torch.randn(5), [2, 1], [1, 0], [1, 1], 1),
    "conv2d of one image": (IMAGES[0], FILTERS, None, [1, 1], [0, 0], [1, 1], 1),
    "conv2d, channels_last": (IMAGES.to(memory_format=torch.channels_last), FILTERS, None, [1], [0], [1], 1),
    "conv2d.padding": (IMAGES, FILTERS, None, [1, 1], "same", [1, 1], 1),
}


def call(name, dtype=torch.bfloat16):
    """Return the operator of a call, and all its arguments."""
    op, args = name.partition(" ")[0].rstrip(","), CALLS[name]
    convolution = Conv1d if op.startswith("conv1d") else Conv2d
    kernel = convolution(True, overload="padding" if op.endswith("padding") else "default")
    return kernel.operator, [*args, *kernel.prepack(args[kernel.weight]), dtype, *kernel.constants]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_operator_is_as_its_fake_one(name, dtype):
    operator, args = call(name, dtype)
    torch.library.opcheck(operator, tuple(args), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", [name for name in CALLS if "conv2d" in name])
def test_a_convolution_rejects_arguments_that_it_cannot_compute(name, subtests):
    for at, value, message in [
        (3, [0, 1], "expected a positive stride" + "|needs a stride" * ("padding" in name)),
        (5, [1, 0], "expected a positive stride and dilation"),
        (6, 2, "expected a number of groups that divides 5 output channels, got 2"),
        (0, torch.ones(9, 9), "expected images of 3 or 4 dimensions, got 2"),
    ]:
        with subtests.test(at=at, value=value, message=message):
            operator, args = call(name)
            args[at] = value
            with pytest.raises(RuntimeError, match=message):
                operator(*args)
