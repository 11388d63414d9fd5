"""The CPU's int8 and int4 matmuls, and those of few rows: for every op, dtype, size, layout and instruction set."""

import functools
import itertools

import pytest
import torch

from .conftest import ISAS, NAMES
from .matmul_kinds import FEW_ROWS, INT8, LAYOUTS, SETS, SIMDS, FewRows, Int4, Int8, Int8OneScale

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INF, NAN = torch.inf, torch.nan
QUANTIZED = [
    pytest.param(functools.partial(kind, isa), id=f"{kind.__name__}-{NAMES[isa]}")
    for kind in (Int8, Int8OneScale, Int4)
    for isa in ISAS
]
OF_FEW_ROWS = [pytest.param(functools.partial(FewRows, simd), id=f"FewRows-{SETS[simd]}") for simd in SIMDS if FEW_ROWS]
pytestmark = pytest.mark.skipif(not INT8, reason=f"no int8 here: {INT8.reason}")


@pytest.fixture(params=QUANTIZED + OF_FEW_ROWS)
def kind(request):
    torch.manual_seed(0)
    return request.param()


@pytest.fixture(params=QUANTIZED)
def quantized(request):
    torch.manual_seed(0)
    return request.param()


@pytest.fixture(params=["linear", "matmul", "mm", "addmm"])
def op(request):
    return request.param


def arguments(op, x, weight, bias):
    """Return the arguments of an op, given a weight [N, K]."""
    return {"linear": (x, weight, bias), "addmm": (bias, x, weight.t(), 0.5, 2)}.get(op, (x, weight.t()))


def test_each_dtype_is_taken_and_given(kind, subtests):
    of_biases = [(torch.half, torch.bfloat16, of_bias, kind.dtype) for of_bias in (*FLOATS, torch.float64)]
    for of_x, of_weight, of_bias, wanted in [*itertools.product(FLOATS, FLOATS, FLOATS[:1], kind.dtypes), *of_biases]:
        with subtests.test(of_x=of_x, of_weight=of_weight, of_bias=of_bias, wanted=wanted):
            x, weight, bias = torch.randn(5, 130).to(of_x), torch.randn(70, 130).to(of_weight), torch.randn(70)
            kind.check(x, weight, bias.to(of_bias), wanted)


def test_activations_have_any_number_of_dimensions(kind, subtests):
    shapes = [(130,), (1, 130), (2, 3, 130), (2, 1, 3, 130), (0, 130), (2, 0, 130)]
    for x in [*map(torch.randn, shapes), torch.randn(3, 2, 130).transpose(0, 1)]:
        with subtests.test(shape=x.shape):
            weight = torch.randn(70, 130)
            actual = kind.linear(x, weight)
            assert actual.shape == (*x.shape[:-1], 70)
            assert torch.equal(actual.reshape(-1, 70), kind.linear(x.reshape(-1, 130), weight))
            assert torch.equal(kind.run("matmul", x, weight.t()), actual)
            if actual.numel():
                kind.check(x.reshape(-1, 130), weight)


def test_each_layout_is_right(kind, subtests):
    for left, right in itertools.product(LAYOUTS, LAYOUTS):
        with subtests.test(left=left, right=right):
            x, weight = LAYOUTS[left](kind.rows[3], 130), LAYOUTS[right](70, 130)
            assert torch.equal(kind.run("mm", x, weight.t()), kind.check(x, weight))


BIASES = {
    "vector": lambda: torch.randn(70),
    "row": lambda: torch.randn(1, 70),
    "column": lambda: torch.randn(5, 1),
    "matrix": lambda: torch.randn(5, 70),
    "transposed matrix": lambda: torch.randn(70, 5).t(),
    "one": lambda: torch.randn(1),
    "number": lambda: torch.tensor(0.5),
    "bfloat16": lambda: torch.randn(70).bfloat16(),
}


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (2, -0.5), (0.25, 3), (0, 3), (0.25, 0)])
def test_addmm_applies_beta_and_alpha_before_it_rounds(kind, beta, alpha, subtests):
    for bias in BIASES:
        with subtests.test(bias=bias):
            x, weight, added = torch.randn(5, 130), torch.randn(70, 130), BIASES[bias]()
            given = added if beta else added * NAN  # which torch then ignores
            actual = kind.run("addmm", given, x, weight.t(), beta, alpha, dtype=torch.bfloat16)
            expected = beta * added.double() + alpha * kind.value(x, weight).double()
            torch.testing.assert_close(actual.double(), expected.expand(5, 70), rtol=2**-8, atol=1e-5)


def test_the_number_of_threads_makes_no_difference(kind, subtests):
    for rows, terms, columns in [(1, 3000, 100), (3, 3000, 1000), (8, 900, 500), (300, 600, 200)]:
        if rows <= 8 or kind.rows[-1] > 8:
            x = torch.randn(rows, terms)
            for weight in (torch.randn(columns, terms), torch.randn(terms, columns).t()):
                expected = kind.linear(x, weight)
                for threads in (1, 2, 3, 5, 8):
                    with subtests.test(rows=rows, terms=terms, columns=columns, threads=threads):
                        torch.set_num_threads(threads)
                        assert torch.equal(kind.linear(x, weight), expected)


def test_zeros_give_the_bias(kind):
    for rows in kind.rows:
        x, weight, bias = torch.randn(rows, 300), torch.randn(70, 300), torch.randn(70)
        expected = bias.to(kind.dtype).expand(rows, 70)
        assert torch.equal(kind.linear(x * 0, weight, bias), expected)
        assert torch.equal(kind.linear(x, weight * 0, bias), expected)
        x[-1], weight[[3, 69]] = 0, 0
        kind.check(x, weight, bias)


@pytest.mark.parametrize("kind", [Int8, Int4, *[FewRows] * bool(FEW_ROWS)])
def test_an_operator_is_as_its_fake_one(kind, op, subtests):
    shapes = [(5, 130), (2, 3, 130)] if op in ("linear", "matmul") else [(5, 130)]
    for dtype, shape in itertools.product((torch.bfloat16, torch.float16), shapes):
        with subtests.test(dtype=dtype, shape=shape):
            of = kind()
            kernel, args = of.kernel(op), arguments(op, torch.randn(shape), torch.randn(70, 130), torch.randn(70))
            for factors in ((), (torch.rand(130) + 1,)) if kernel.equalizes else ((),):
                packed = of.prepared(kernel, args[kernel.weight], dtype, *factors)
                given = (*args, *packed, dtype, *kernel.constants)
                torch.library.opcheck(kernel.operator, given, test_utils=("test_schema", "test_faketensor"))


# ---- Of prepacked weights.


def test_activations_and_weights_of_any_size_are_right(quantized, subtests):
    for factor, rows in itertools.product([1e-45, 1e-40, 1e-30, 1e29, 1e30], [5, 20]):
        with subtests.test(factor=factor, rows=rows):
            x, weight = torch.randn(rows, 300), torch.randn(70, 300)
            quantized.check(x * factor, weight)
            large = x * factor
            large[:, 256:] = 0
            quantized.check(large, weight)
            if factor < 1e30:
                weight[::2] *= factor
                quantized.check(x, weight)


def test_a_weight_with_inf_or_nan_or_what_is_too_large_is_not_packed(quantized, subtests):
    for value in [INF, -INF, NAN, 2.0**101]:
        with subtests.test(value=value):
            weight = torch.randn(70, 130)
            weight[69, 129] = value
            assert quantized.kernel("linear").prepack(weight) is None
            assert quantized.kernel("mm").prepack(weight.t()) is None


def test_sums_that_may_not_fit_are_declined(quantized):
    terms = torch.ones(1, 65537)
    reason = "its sums have more than 65536 terms, which may not fit 32 bits"
    assert quantized.kernel("linear").unsupported_reason(terms, terms, None) == reason
    assert quantized.kernel("mm").unsupported_reason(terms, terms.t()) == reason


def test_the_longest_sums_do_not_overflow(quantized):
    x, weight = torch.ones(2, 65536), torch.full((2, 65536), -1.0)
    weight[1] = 1
    result = quantized.check(x, weight)
    torch.testing.assert_close(result, torch.tensor([[-65536.0, 65536.0]]).expand(2, 2), rtol=0.005, atol=0)


def new_factors(terms):
    """Return factors that differ much, all powers of two: multiplying by them rounds nothing."""
    return 2.0 ** (torch.arange(terms) * 7 % 11)


@pytest.mark.parametrize(("rows", "terms"), [(1, 64), (5, 130), (1, 7), (33, 200), (300, 17), (20, 300)])
def test_factors_divide_the_activations_and_multiply_the_weight(quantized, rows, terms, subtests):
    for of_x, of_weight in itertools.product(FLOATS, FLOATS):
        with subtests.test(of_x=of_x, of_weight=of_weight):
            x, weight, bias = torch.randn(rows, terms).to(of_x), torch.randn(70, terms).to(of_weight), torch.randn(70)
            factors = new_factors(terms)
            expected = quantized.check(x.float() / factors, weight.float() * factors, bias)
            assert torch.equal(quantized.linear(x, weight, bias, factors=[factors]), expected)


def test_each_op_takes_factors(quantized, subtests):
    for dtype in FLOATS:
        with subtests.test(dtype=dtype):
            x, weight, bias, factors = torch.randn(5, 130), torch.randn(70, 130), torch.randn(70), new_factors(130)
            how = {"dtype": dtype, "factors": [factors]}
            expected, columns = quantized.linear(x, weight, None, **how), weight.t().contiguous()
            assert torch.equal(quantized.run("mm", x, columns, **how), expected)
            assert torch.equal(quantized.run("matmul", x[None], weight.t(), **how)[0], expected)
            with_bias = quantized.linear(x, weight, bias, **how)
            assert torch.equal(quantized.run("addmm", bias, x, columns, 1, 1, **how), with_bias)


def test_with_factors_inf_and_nan_change_their_own_rows_only(quantized, subtests):
    for value in [INF, -INF, NAN]:
        with subtests.test(value=value):
            x, weight, factors = torch.randn(3, 130), torch.randn(70, 130), [new_factors(130)]
            expected = quantized.linear(torch.where(torch.arange(3)[:, None] == 1, 0, x), weight, factors=factors)
            x[1, 5] = value
            result = quantized.linear(x, weight, factors=factors)
            assert torch.equal(result[[0, 2]], expected[[0, 2]])
            assert not result[1].isfinite().any()


def test_a_weight_that_overflows_by_its_factors_is_not_prepacked(quantized):
    kernel = quantized.kernel("linear")
    assert kernel.prepack(torch.full((4, 8), 2.0**90), torch.full((8,), 2.0**20)) is None
