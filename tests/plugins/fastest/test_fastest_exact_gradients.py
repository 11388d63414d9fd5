"""Gradients of the recipe "fastest" on random shapes and strides, against float64 and torch's fast-dtype kernels."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polycast import autocast

pytestmark = pytest.mark.usefixtures("engine")
CASES = 60
FAST = (torch.bfloat16, torch.float16)
SUM_ERROR = 4e-6
"""The error of a sum in float32, relative to the sum of the magnitudes."""


def laid_out(pick, tensor):
    """Return a tensor with strides of some kind."""
    kind = pick.choice(["dense", "transposed", "every second"])
    if kind == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous().mT
    return torch.stack([tensor, tensor], -1)[..., 0] if kind == "every second" else tensor


def random_call(pick):
    """Return a function that is linear in each argument, and random arguments: an activation, a weight, a bias."""
    rows, inner, columns, batch = (pick.choice([1, 2, 3, 7, 16, 33]) for _ in range(4))
    op = pick.choice(["linear", "mm", "addmm", "matmul", "bmm", "baddbmm", "conv1d", "conv2d"])
    function, *shapes = {
        "linear": (F.linear, (batch, rows, inner), (columns, inner), (columns,)),
        "mm": (torch.mm, (rows, inner), (inner, columns)),
        "addmm": (lambda x, w, b: torch.addmm(b, x, w), (rows, inner), (inner, columns), (columns,)),
        "matmul": (torch.matmul, (batch, rows, inner), (inner, columns)),
        "bmm": (torch.bmm, (batch, rows, inner), (batch, inner, columns)),
        "baddbmm": (lambda x, w, b: torch.baddbmm(b, x, w), (batch, rows, inner), (batch, inner, columns), (columns,)),
        "conv1d": (F.conv1d, (batch, inner, rows + 2), (columns, inner, 3), (columns,)),
        "conv2d": (F.conv2d, (2, inner, rows + 2, 5), (columns, inner, 3, 2), (columns,)),
    }[op]
    scales = [pick.choice([1.0, 1e-2, 1e2]) for _ in shapes]
    args = [laid_out(pick, torch.randn(shape) * scale) for shape, scale in zip(shapes, scales, strict=True)]
    if pick.random() < 0.3:
        args[0] = args[0].bfloat16()
    if pick.random() < 0.5:
        args[1] = nn.Parameter(args[1])
    return function, [each.detach() if type(each) is torch.Tensor else each for each in args]


def gradients(function, args, gradient, region=None):
    """Return the gradients of the arguments."""
    given = [each if isinstance(each, nn.Parameter) else each.requires_grad_() for each in args]
    if region is None:
        result = function(*given)
    else:
        with region:
            result = function(*given)
    return torch.autograd.grad(result, given, gradient.to(result.dtype))


def rounding_error(values, dtype):
    """Return how far rounding to a dtype may be off: denormal numbers have the errors of the smallest normal one."""
    limits = torch.finfo(dtype)
    return (values.abs() + limits.smallest_normal) * limits.eps / 2


@pytest.mark.parametrize("fast", FAST, ids=str)
def test_gradients_of_products_err_by_roundings_to_the_fast_dtype_alone(fast, float32_way):
    pick = random.Random(0)
    torch.manual_seed(0)
    ours_off, torchs_off = [], []
    for _ in range(CASES):
        function, args = random_call(pick)
        gradient = torch.randn(function(*(each.detach().float() for each in args)).shape).to(fast)
        ours = gradients(function, args, gradient, autocast("cpu", fast, recipe=float32_way))
        torchs = gradients(function, args, gradient, torch.autocast("cpu", fast))
        exact = gradients(function, [each.detach().double() for each in args], gradient.double())
        # The casts are saved: each term of a gradient has the error of the other operand.
        magnitudes = [each.detach().double().abs() for each in args]
        magnitude = gradients(function, magnitudes, gradient.double().abs())
        errors = [rounding_error(each, fast) for each in magnitudes]
        of_saved = gradients(function, errors, gradient.double().abs())
        for at, (one, of_torch, wanted, arg) in enumerate(zip(ours, torchs, exact, args, strict=True)):
            assert (one.dtype, one.shape) == (arg.dtype, arg.shape)
            bound = magnitude[at] * SUM_ERROR + (of_saved[at] if at < 2 else 0)
            if at < 2 and not isinstance(arg, nn.Parameter):  # those of weights and biases are float32 as they are
                bound += rounding_error(wanted, fast) + (arg.dtype is not torch.float32) * rounding_error(
                    wanted, arg.dtype
                )
            assert bool(((one.double() - wanted).abs() <= 1.01 * bound).all())
            scale = magnitude[at].max().clamp(min=1e-30)
            ours_off.append(((one.double() - wanted) / scale).flatten())
            torchs_off.append(((of_torch.double() - wanted) / scale).flatten())
    assert torch.cat(ours_off).norm() <= torch.cat(torchs_off).norm()


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("fast", FAST, ids=str)
def test_gradients_of_attention_are_as_exact_as_torchs(fast, float32_way, is_narrow):
    pick = random.Random(0)
    torch.manual_seed(0)
    ours_off, torchs_off = [], []
    for _ in range(40):
        batch, heads, rows, keys, features = (pick.choice([1, 2, 3, 5, 8, 17]) for _ in range(5))
        dtype = fast if is_narrow else torch.float32
        args = [torch.randn(batch, heads, length, features).to(dtype) for length in (rows, keys, keys)]
        gradient = torch.randn(batch, heads, rows, features).to(fast)
        is_causal = pick.random() < 0.3

        def attention(*given, is_causal=is_causal):
            return F.scaled_dot_product_attention(*given, is_causal=is_causal)

        ours = gradients(attention, args, gradient, autocast("cpu", fast, recipe=float32_way))
        torchs = gradients(attention, args, gradient, torch.autocast("cpu", fast))
        exact = gradients(attention, [each.detach().double() for each in args], gradient.double())
        for one, of_torch, wanted in zip(ours, torchs, exact, strict=True):
            assert (one.dtype, one.shape) == (dtype, wanted.shape)
            error = (one.double() - wanted).norm()
            assert error <= 4 * torch.finfo(fast).eps * gradient.double().norm() * (1 + args[2].double().norm())
            (
                ours_off.append((one.double() - wanted).flatten()),
                torchs_off.append((of_torch.double() - wanted).flatten()),
            )
    assert torch.cat(ours_off).norm() <= torch.cat(torchs_off).norm()
