"""Gradients of the recipe "fastest": those of the products of what is saved, in each way, rounded once."""

import itertools
import random
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from polycast import Fastest, autocast
from polycast_plugins.fastest.choose_way import Way

pytestmark = pytest.mark.usefixtures("engine")
FAST, FLOAT32 = Way.FAST, Way.FLOAT32
ROUNDED_OTHERWISE = 0.03
"""The part of the elements that may be rounded to the neighbour, since sums have errors; in another dtype it is 0.2."""


def bias(x, features):
    return torch.ones(features, dtype=x.dtype)


OPS = {
    "linear": (lambda x, w: F.linear(x, w, bias(x, 40)), (48, 64), (40, 64)),
    "mm": (lambda x, w: torch.mm(x, w), (48, 64), (64, 40)),
    "addmm": (lambda x, w: torch.addmm(bias(x, 40), x, w, beta=0.5, alpha=2), (48, 64), (64, 40)),
    "bmm": (lambda x, w: torch.bmm(x, w), (3, 48, 64), (3, 64, 40)),
    "conv2d": (lambda x, w: F.conv2d(x, w, bias(x, 16), stride=2, padding=1), (3, 8, 11, 9), (16, 8, 3, 3)),
}


def dtype_of(way):
    return torch.float32 if way is FLOAT32 else torch.bfloat16


def product(function, x, weight, way):
    """Return the product of tensors that are rounded to the dtype of a way, in float64."""
    with torch.autocast("cpu", enabled=False):
        return function(*(each.detach().to(dtype_of(way)).double() for each in (x, weight)))


def gradients(function, *args, gradient):
    """Return the gradients of a product in float64."""
    given = [each.detach().double().requires_grad_() for each in args]
    return torch.autograd.grad(function(*given), given, gradient.double())


def rounded_otherwise(found, expected):
    """Return the part of the elements that are not those of a tensor in float64, rounded to bfloat16."""
    return float((found != expected.to(torch.bfloat16).to(found.dtype)).double().mean())


WAYS = list(itertools.product((FAST, FLOAT32), repeat=3))
"""The ways of the forward, and of the gradients of both factors. One op computes both gradients of a convolution."""
CASES = [(op, ways) for op in OPS for ways in WAYS if op != "conv2d" or ways[1] is ways[2]]


@pytest.mark.parametrize("is_weight", [True, False], ids=["weight", "activation"])
@pytest.mark.parametrize(
    ("op", "ways"), CASES, ids=[f"{op}-{'-'.join(way.value for way in ways)}" for op, ways in CASES]
)
def test_gradients_are_those_of_the_products_in_each_way(op, ways, is_weight, profile_of, choose_ways):
    forward, of_first, of_second = ways
    if op == "conv2d" and of_first is FAST and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("torch rounds sums in the gradients of bfloat16 convolutions on this processor")
    function, *shapes = OPS[op]
    choose_ways(ways)
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, requires_grad=True) for shape in shapes)
    weight = nn.Parameter(weight.detach()) if is_weight else weight
    with autocast("cpu", recipe=Fastest(profile_of(bfloat16=1.0))):
        result = function(x, weight if is_weight else weight * 1)
    gradient = torch.randn(result.shape).bfloat16()
    of_x, of_weight = torch.autograd.grad(result, (x, weight), gradient)

    assert rounded_otherwise(result, product(function, x, weight, forward)) < ROUNDED_OTHERWISE
    # The casts are saved.
    expected_x, expected_weight = gradients(function, x.bfloat16(), weight.bfloat16(), gradient=gradient)
    assert rounded_otherwise(of_x, expected_x) < ROUNDED_OTHERWISE
    if is_weight and of_second is FLOAT32:
        torch.testing.assert_close(of_weight, expected_weight.float(), rtol=1e-4, atol=1e-4)
    else:
        assert rounded_otherwise(of_weight, expected_weight) < ROUNDED_OTHERWISE


def laid_out(pick, tensor):
    """Return a tensor with strides of some kind."""
    kind = pick.choice(["dense", "transposed", "every second"])
    if kind == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous().mT
    return torch.stack([tensor, tensor], -1)[..., 0] if kind == "every second" else tensor


def random_call(pick):
    """Return a function of an op, and random arguments: an activation, a weight, and for some ops a bias."""
    rows, inner, columns, batch = (pick.choice([1, 2, 3, 7, 16, 33]) for _ in range(4))
    function, *shapes = pick.choice(
        [
            (F.linear, (batch, rows, inner), (columns, inner), (columns,)),
            (torch.mm, (rows, inner), (inner, columns)),
            (lambda x, w, b: torch.addmm(b, x, w), (rows, inner), (inner, columns), (columns,)),
            (torch.matmul, (batch, rows, inner), (inner, columns)),
            (torch.bmm, (batch, rows, inner), (batch, inner, columns)),
            (lambda x, w, b: torch.baddbmm(b, x, w), (batch, rows, inner), (batch, inner, columns), (columns,)),
            (F.conv1d, (batch, inner, rows + 2), (columns, inner, 3), (columns,)),
            (F.conv2d, (2, inner, rows + 2, 5), (columns, inner, 3, 2), (columns,)),
        ]
    )
    args = [laid_out(pick, torch.randn(shape) * pick.choice([1.0, 1e-2, 1e2])) for shape in shapes]
    if pick.random() < 0.3:
        args[0] = args[0].bfloat16()
    if pick.random() < 0.5:
        args[1] = nn.Parameter(args[1])
    return function, [each.requires_grad_() for each in args]


@pytest.mark.parametrize("fast", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_random_products_err_by_roundings_alone(fast, float32_way):
    pick = random.Random(0)
    torch.manual_seed(0)
    for _ in range(60):
        function, args = random_call(pick)
        with autocast("cpu", fast, recipe=float32_way):
            result = function(*args)
        gradient = torch.randn(result.shape).to(fast)
        found = torch.autograd.grad(result, args, gradient)
        saved = [each.detach().to(fast) if at < 2 else each for at, each in enumerate(args)]
        expected = gradients(function, *saved, gradient=gradient)
        magnitudes = gradients(function, *(each.detach().abs() for each in saved), gradient=gradient.abs())
        for one, exact, magnitude, arg in zip(found, expected, magnitudes, args, strict=True):
            assert (one.dtype, one.shape) == (arg.dtype, arg.shape)
            error = magnitude * 4e-6  # of a sum in float32
            if arg is args[0] or (
                arg is args[1] and not isinstance(arg, nn.Parameter)
            ):  # others are float32 as they are
                for dtype in {fast, arg.dtype} - {torch.float32}:
                    limits = torch.finfo(dtype)
                    error += (exact.abs() + limits.smallest_normal) * limits.eps / 2
            assert bool(((one.double() - exact).abs() <= 1.01 * error).all())


def test_an_attention_has_a_second_derivative_where_torch_computes_it_by_other_kernels(float32_way):
    torch.manual_seed(0)
    operands = [torch.randn(2, 3, 24, 16).bfloat16().requires_grad_() for _ in range(3)]

    def second_derivative(operands, region, kernels):
        with kernels, region:
            result = F.scaled_dot_product_attention(*operands)
        (of_query,) = torch.autograd.grad(result.square().sum(), operands[0], create_graph=True)
        return torch.autograd.grad(of_query.square().sum(), operands[0])[0].double()

    doubles = [each.detach().double().requires_grad_() for each in operands]
    exact = second_derivative(doubles, nullcontext(), sdpa_kernel(SDPBackend.MATH))
    for _ in range(2):  # the engine keeps what it decides for equal calls
        with pytest.raises(RuntimeError, match="not implemented"):
            second_derivative(operands, autocast("cpu", recipe=float32_way), nullcontext())
        found = second_derivative(operands, autocast("cpu", recipe=float32_way), sdpa_kernel(SDPBackend.MATH))
        assert float((found - exact).norm() / exact.norm()) < 0.02
        assert torch.backends.cuda.flash_sdp_enabled()


WRONG = {
    "a mask of integers": {"attn_mask": torch.ones(24, 24, dtype=torch.int32)},
    "a mask of another size": {"attn_mask": torch.ones(24, 23)},
}


@pytest.mark.parametrize("options", WRONG.values(), ids=WRONG)
def test_wrong_arguments_of_an_attention_raise_torchs_error(float32_way, options):
    operands = [torch.randn(2, 3, 24, 16).bfloat16().requires_grad_() for _ in range(3)]
    for region in (torch.autocast("cpu"), *[autocast("cpu", recipe=float32_way)] * 2):
        with region, pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(*operands, **options)
