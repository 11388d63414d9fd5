"""The operators of the CPU's int8 kernels: their fake results, and invalid arguments."""

import pytest
import torch

import polycast
from polycast_plugins.quantize.cpu.int8 import Conv1d, Conv2d, Int8Matmul

AVAILABLE = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"no int8 here: {AVAILABLE.reason}")

X, WEIGHT, IMAGES, FILTERS = torch.randn(5, 130), torch.randn(70, 130), torch.randn(2, 8, 9, 9), torch.randn(5, 8, 3, 3)
BATCHES = torch.randn(2, 3, 130)
CALLS = {
    "linear": (BATCHES, WEIGHT, torch.randn(70)),
    "linear without a bias": (X, WEIGHT, None),
    "matmul": (BATCHES, WEIGHT.t()),
    "mm": (X, WEIGHT.t()),
    "addmm": (torch.randn(70), X, WEIGHT.t(), 0.5, 2),
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
    op = name.partition(" ")[0].rstrip(",")
    args = CALLS[name]
    if op.startswith("conv"):
        convolution = Conv1d if op.startswith("conv1d") else Conv2d
        kernel = convolution(True, overload="padding" if op.endswith("padding") else "default")
    else:
        kernel = Int8Matmul(True).kernels()[f"aten::{op}"]
    packed = kernel.prepack(args[kernel.weight])
    return kernel.operator, (*args, *packed, dtype, *kernel.constants)


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_is_as_its_fake_one(name, subtests):
    for dtype in [torch.bfloat16, torch.float16]:
        with subtests.test(dtype=dtype):
            operator, args = call(name, dtype)
            torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", [name for name in CALLS if "conv2d" in name])
def test_a_convolution_rejects_arguments_that_it_cannot_compute(name, subtests):
    for at, value, message in [
        (3, [0, 1], "expected a positive stride"),
        (5, [1, 0], "expected a positive stride and dilation"),
        (6, 2, "expected a number of groups that divides 5 output channels, got 2"),
        (0, torch.ones(9, 9), "expected images of 3 or 4 dimensions, got 2"),
    ]:
        with subtests.test(at=at, value=value, message=message):
            operator, args = call(name)
            given = [*args]
            given[at] = value
            with pytest.raises(
                RuntimeError, match=message if at != 3 or "padding" not in name else message + "|needs a stride"
            ):
                operator(*given)


@pytest.mark.parametrize("name", ["linear", "matmul", "mm"])
def test_a_matmul_rejects_activations_that_do_not_fit(name):
    operator, args = call(name)
    with pytest.raises(RuntimeError, match="the activations have 7 terms, the weight another number"):
        operator(torch.ones(5, 7), *args[1:])
    with pytest.raises(RuntimeError, match="expected activations with at least one dimension"):
        operator(torch.tensor(1.0), *args[1:])
