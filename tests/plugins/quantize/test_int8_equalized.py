"""Int8 products by weights that were prepacked with the factors of an equalization."""

import itertools

import pytest
import torch

import polycast
from polycast_plugins.quantize.cpu.int8 import Int8Matmul
from polycast_plugins.testing.low_bit import assert_within, run_prepacked

from .low_bit_calls import int8_product

AVAILABLE = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"no int8 here: {AVAILABLE.reason}")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def new_factors(terms):
    """Return factors that differ much, all powers of two: multiplying by them rounds nothing."""
    return torch.tensor([2.0 ** (term * 7 % 11) for term in range(terms)])


def run(op, by_row, isa, args, factors=None, dtype=torch.float32):
    kernel = Int8Matmul(by_row, isa).kernels()[f"aten::{op}"]
    given = () if factors is None else (factors,)
    return run_prepacked(kernel, kernel.prepack(args[kernel.weight], *given), *args, dtype=dtype)


@pytest.mark.parametrize(("rows", "terms"), [(1, 64), (5, 130), (1, 7), (33, 200), (300, 17)])
def test_it_is_the_product_of_the_divided_activations_and_the_multiplied_weight(isa, by_row, rows, terms, subtests):
    for of_x, of_weight in itertools.product(FLOATS, FLOATS):
        with subtests.test(of_x=of_x, of_weight=of_weight):
            x, weight, bias = torch.randn(rows, terms).to(of_x), torch.randn(70, terms).to(of_weight), torch.randn(70)
            factors = new_factors(terms)
            divided, multiplied = x.float() / factors, weight.float() * factors
            equalized = run("linear", by_row, isa, (x, weight, bias), factors)
            assert torch.equal(equalized, run("linear", by_row, isa, (divided, multiplied, bias)))
            expected, error = int8_product(divided, multiplied, by_row)
            assert_within(equalized, expected + bias.double(), error)


def test_the_instruction_sets_agree_for_any_factors(isa):
    x, weight, factors = torch.randn(5, 130).bfloat16(), torch.randn(70, 130), torch.rand(130) * 50 + 1
    plain = run("linear", True, 0, (x, weight, None), factors)
    assert torch.equal(run("linear", True, isa, (x, weight, None), factors), plain)


def test_each_op_takes_factors(isa, by_row, subtests):
    for dtype in FLOATS:
        with subtests.test(dtype=dtype):
            x, weight, bias, factors = torch.randn(5, 130), torch.randn(70, 130), torch.randn(70), new_factors(130)
            expected = run("linear", by_row, isa, (x, weight, None), factors, dtype)
            columns = weight.t().contiguous()
            assert torch.equal(run("mm", by_row, isa, (x, columns), factors, dtype), expected)
            assert torch.equal(run("matmul", by_row, isa, (x[None], weight.t()), factors, dtype)[0], expected)
            with_bias = run("linear", by_row, isa, (x, weight, bias), factors, dtype)
            assert torch.equal(run("addmm", by_row, isa, (bias, x, columns, 1, 1), factors, dtype), with_bias)


def test_channels_that_are_much_larger_than_the_others_lose_no_accuracy(isa, by_row):
    x, weight = torch.randn(64, 256), torch.randn(128, 256)
    large, factors = torch.ones(256), torch.ones(256)
    large[[3, 77, 130]] = factors[[3, 77, 130]] = 256.0
    args = (x * large, weight / large, None)
    exact = x @ weight.t()

    def error(result):
        return ((result - exact).norm() / exact.norm()).item()

    assert error(run("linear", by_row, isa, args)) > 0.1
    assert error(run("linear", by_row, isa, args, factors)) < 0.015


def test_inf_and_nan_change_their_own_rows_only(isa, by_row, subtests):
    for value in [torch.inf, -torch.inf, torch.nan]:
        with subtests.test(value=value):
            x, weight, factors = torch.randn(3, 130), torch.randn(70, 130), new_factors(130)
            expected = run("linear", True, isa, (x, weight, None), factors)
            x[1, 5] = value
            result = run("linear", True, isa, (x, weight, None), factors)
            assert torch.equal(result[[0, 2]], expected[[0, 2]])
            assert not result[1].isfinite().any()


def test_a_weight_that_overflows_by_its_factors_is_not_prepacked(isa):
    kernel = Int8Matmul(True, isa).kernels()["aten::linear"]
    assert kernel.prepack(torch.full((4, 8), 2.0**90), torch.full((8,), 2.0**20)) is None


@pytest.mark.parametrize(
    "factors", [torch.ones(7), torch.ones(8, dtype=torch.float64), torch.ones(1, 8)], ids=["size", "dtype", "matrix"]
)
def test_wrong_factors_are_refused(factors):
    kernel = Int8Matmul(True).kernels()["aten::linear"]
    with pytest.raises(RuntimeError, match="expected a float32 factor for each of 8 terms, got"):
        kernel.prepack(torch.randn(4, 8), factors)


def test_an_operator_refuses_another_number_of_factors():
    kernel = Int8Matmul(True).kernels()["aten::linear"]
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    *packed, _ = kernel.prepack(weight)
    with pytest.raises(RuntimeError, match="the activations have 8 terms, and there are 7 factors"):
        kernel.operator(x, weight, None, *packed, torch.ones(7), torch.bfloat16, *kernel.constants)


@pytest.mark.parametrize("op", ["linear", "matmul", "mm", "addmm"])
def test_an_operator_with_factors_is_as_its_fake_one(op):
    x, weight = torch.randn(5, 130), torch.randn(70, 130)
    args = {
        "linear": (x, weight, torch.randn(70)),
        "addmm": (torch.randn(70), x, weight.t(), 0.5, 2),
    }.get(op, (x, weight.t()))
    kernel = Int8Matmul(True).kernels()[f"aten::{op}"]
    packed = kernel.prepack(args[kernel.weight], new_factors(130))
    given = (*args, *packed, torch.bfloat16, *kernel.constants)
    torch.library.opcheck(kernel.operator, given, test_utils=("test_schema", "test_faketensor"))
