"""The CPU's int8 products have the same bits by every instruction set: those of their definition."""

import random

import pytest
import torch
import torch.nn.functional as F

import polycast
from polycast_plugins.quantize.cpu.int8 import Int8Matmul

from .low_bit_calls import run_kernel

AVAILABLE = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"no int8 here: {AVAILABLE.reason}")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = (torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-45, 1e-40, 1e-30, 1e30, 3e38)


def levels(matrix, by_row):
    """Return integers from -127 to 127, and the scale of each row; 0 for a row with inf or nan."""
    matrix = matrix.float()
    largest = matrix.abs().amax(-1, keepdim=True)
    finite = largest.isfinite()
    largest = torch.where(finite, largest.clamp(min=2.0**-110), 0)
    largest = torch.where(finite, largest if by_row else largest.max(), 0)
    scale = largest / 127
    return torch.where(finite, (matrix * (1 / scale)).round(), 0), scale


def product(x, weight, bias, dtype, by_row):
    """Return what an int8 product is defined as, computed by torch's ops."""
    (x_levels, x_scale), (weight_levels, weight_scale) = levels(x, by_row), levels(weight, True)
    sums = F.linear(x_levels.double(), weight_levels.double())  # exact
    value = sums.float() * weight_scale.t() * x_scale
    others = ~x.isfinite().all(-1)
    if others.any():  # inf and nan alone, with the quantized weight
        alone = torch.where(x[others].isfinite(), 0, x[others].float())
        value[others] = in_order(alone, weight_levels)
    return (value if bias is None else value + bias.float()).to(dtype)


def in_order(x, weight):
    """Multiply rows of inf, nan and zeros, without the zeros: inf * 0 counts, 0 * inf does not."""
    result = torch.zeros(len(x), len(weight))
    for row, values in zip(result, x, strict=True):
        for k in ((values != 0) | values.isnan()).nonzero().flatten():
            row += values[k] * weight[:, k]
    return result


def random_matrix(pick, rows, columns, dtype):
    """Return a matrix of random strides, magnitudes and special values."""
    how = pick.choice(("dense", "transposed", "slice", "steps", "expanded"))
    shape = {"transposed": (columns, rows), "slice": (rows, columns + 3), "expanded": (1, columns)}.get(
        how, (3 * rows, 2 * columns) if how == "steps" else (rows, columns)
    )
    matrix = torch.randn(shape) * 10 ** pick.uniform(-4, 4)
    if pick.random() < 0.3:
        matrix *= 10 ** torch.empty(shape[0], 1).uniform_(-12, 12)
    matrix = matrix.to(dtype)
    views = {
        "dense": lambda: matrix,
        "transposed": matrix.t,
        "slice": lambda: matrix[:, 1 : columns + 1],
        "steps": lambda: matrix[::3, ::2],
        "expanded": lambda: matrix.expand(rows, columns),
    }
    return views[how]()


def scattered(pick, matrix, values):
    """Return a matrix with values at some random places."""
    matrix = matrix.clone()
    for _ in range(pick.randint(1, 6)):
        matrix[pick.randrange(matrix.shape[0]), pick.randrange(matrix.shape[1])] = pick.choice(values)
    return matrix


@pytest.fixture(params=[1, 2, 3, 5, 8])
def threads(request):
    """Run a test with each number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("part", range(5))
def test_random_products_have_the_bits_of_the_definition(isa, threads, part):
    pick = random.Random(1000 * threads + part)
    torch.manual_seed(1000 * threads + part)
    for _ in range(60):
        rows = pick.choice((1, 1, 2, 3, 4, 5, 6, 7, 9, 33, 70))
        terms = pick.choice((1, 2, 3, 4, 31, 64, 67, 200, 256, 257, 500, 1030))
        columns = pick.choice((1, 7, 15, 63, 64, 65, 130, 300))
        given, packed, wanted = (pick.choice(FLOATS) for _ in range(3))
        x, weight = random_matrix(pick, rows, terms, given), random_matrix(pick, columns, terms, packed)
        if pick.random() < 0.3:
            x = scattered(pick, x, SPECIAL)
        if pick.random() < 0.2:
            weight = scattered(pick, weight, (0.0, -0.0, 1e-45, 1e-40, 1e-30))
        if pick.random() < 0.5:  # levels at both ends, which would saturate 16 bits
            x, weight = x.sign() * 3, weight.sign()
        if not weight.isfinite().all():
            continue
        bias = torch.randn(columns).to(pick.choice(FLOATS)) if pick.random() < 0.5 else None
        by_row = pick.random() < 0.7
        actual = run_kernel(Int8Matmul(by_row, isa).kernels()["aten::linear"], x, weight, bias, dtype=wanted)
        expected = product(x, weight, bias, wanted, by_row)
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.nan_to_num(1e4), expected.nan_to_num(1e4))


def test_sums_of_the_largest_levels_do_not_saturate(isa):
    for sign in (1, -1):
        x, weight = torch.full((5, 4096), 2.0), torch.full((65, 4096), 3.0 * sign)
        actual = run_kernel(Int8Matmul(True, isa).kernels()["aten::linear"], x, weight, None)
        assert torch.equal(actual, product(x, weight, None, torch.float32, True))
        x[:, ::2] *= -1
        actual = run_kernel(Int8Matmul(True, isa).kernels()["aten::linear"], x, weight, None)
        assert torch.equal(actual, torch.zeros(5, 65))


def test_the_default_set_is_the_best_that_torchs_own_kernels_may_use():
    isas = torch.ops.polycast_cpu.isas()
    capability = torch.backends.cpu.get_cpu_capability()
    widest = {"DEFAULT": 0, "AVX2": 2}.get(capability, 4)
    assert torch.ops.polycast_cpu.best_isa() == max(isa for isa in isas if isa <= widest)
