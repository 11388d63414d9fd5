"""The CPU's int4 kernels: the arithmetic of their definition, on every instruction set, for every size and layout."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

import polycast
from polycast_plugins.quantize.cpu.int4 import Int4Matmul
from polycast_plugins.testing.low_bit import run_prepacked

from . import int4_reference as reference

AVAILABLE = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int4())
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"no int4 here: {AVAILABLE.reason}")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INF, NAN = torch.inf, torch.nan


def kernel_of(op, group_size=32, isa=None):
    return Int4Matmul(group_size, isa).kernels()[f"aten::{op}"]


def linear(isa, x, weight, bias=None, group_size=32, dtype=torch.float32):
    kernel = kernel_of("linear", group_size, isa)
    assert kernel.unsupported_reason(x, weight, bias) is None
    return run_prepacked(kernel, kernel.prepack(weight), x, weight, bias, dtype=dtype)


def assert_same(actual, expected):
    """Check that results are equal, but for the last bit where a fused multiply-add was rounded twice."""
    torch.testing.assert_close(actual, expected, rtol=torch.finfo(actual.dtype).eps, atol=0, equal_nan=True)
    assert (actual == expected).double().mean() > 0.99 or actual.numel() < 200


def check(isa, x, weight, bias=None, group_size=32, dtype=torch.float32):
    actual = linear(isa, x, weight, bias, group_size, dtype)
    values, _ = kernel_of("linear", group_size).prepack(weight)
    unpacked = reference.unpack(values, *weight.shape, group_size)
    assert_same(actual, reference.product(x, unpacked, group_size, bias, dtype=dtype))
    return actual


def test_random_products_are_those_of_the_definition_and_rows_alone_have_the_same_bits(isa, subtests):
    for part in range(16):
        with subtests.test(part=part):
            pick = random.Random(part)
            torch.manual_seed(part)
            for _ in range(40):
                rows = pick.choice((1, 2, 3, 4, 5, 7, 8, 9, 17, 40, 70))
                terms, columns = pick.choice((1, 8, 31, 200, 600)), pick.choice((1, 60, 130))
                terms, columns = terms + pick.randrange(70), columns + pick.randrange(6)
                group_size = pick.choice((16, 32, 32, 48, 64, 128, 256, 512))
                x = (torch.randn(rows, terms) * 10 ** pick.uniform(-6, 6)).to(pick.choice(FLOATS))
                x = x if x.isfinite().all() else x.nan_to_num(1, 1, 1)
                weight = torch.randn(columns, terms) * torch.rand(columns, 1) ** 4
                weight = weight if pick.random() < 0.5 else weight.t().contiguous().t()
                bias = torch.randn(columns) if pick.random() < 0.5 else None
                dtype = pick.choice(FLOATS)
                actual = check(isa, x, weight, bias, group_size, dtype)
                row = pick.randrange(rows)
                assert torch.equal(linear(isa, x[row], weight, bias, group_size, dtype), actual[row])


@pytest.mark.parametrize("scale", [1.0, 1e-38, 1e-30, 1e28])
def test_a_weight_is_packed_into_the_nearest_values_of_the_definition(scale, subtests):
    for group_size in [16, 32, 48, 64, 128, 256, 512, 4096]:
        with subtests.test(group_size=group_size):
            torch.manual_seed(group_size)
            weight = torch.randn(70, 700) * (1 + 20 * torch.rand(700) ** 8) * scale
            weight[3], weight[4, :300] = 0, 0
            values, _ = kernel_of("linear", group_size).prepack(weight)
            integers, scales = reference.unpack(values, 70, 700, group_size)
            expected, expected_scales = reference.quantize(weight, group_size)
            assert torch.equal(scales, expected_scales)
            by_chunk = scales.repeat_interleave(reference.chunk_of(700, group_size)[1], 1)[:, :700]
            target = weight / by_chunk
            differs = (integers != expected).any(1)
            errors = [(each - target)[differs].double().square().sum(1) for each in (integers, expected)]
            torch.testing.assert_close(*errors, rtol=1e-4, atol=0)  # multipliers of equal errors, but for rounding
            assert differs.float().mean() < 0.1
            assert (integers[3] == 0).all()


def test_sizes_need_be_no_multiple_of_anything(isa, subtests):
    for columns, terms in itertools.product([1, 15, 63, 64, 65, 200], [1, 2, 7, 8, 9, 63, 64, 65, 255, 257]):
        with subtests.test(columns=columns, terms=terms):
            for rows in (1, 4, 20):
                check(isa, torch.randn(rows, terms), torch.randn(columns, terms), torch.randn(columns))


def test_each_number_of_rows_is_right(isa, subtests):
    for rows in [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 257, 300]:
        with subtests.test(rows=rows):
            check(isa, torch.randn(rows, 520), torch.randn(70, 520))


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums_do_not_overflow(isa, sign, subtests):
    for group_size in [16, 32, 64, 256]:
        with subtests.test(group_size=group_size):
            for rows in (1, 12):
                x, weight = torch.full((rows, 4096), 127.0), torch.full((3, 4096), sign * 120.0)
                weight[1, ::group_size] = -7.5 * sign
                check(isa, x, weight, group_size=group_size)
                check(isa, -x, weight, group_size=group_size)


def test_the_longest_sums_of_one_group_do_not_overflow(isa):
    x, weight = torch.ones(2, 65536), torch.full((2, 65536), -1.0)
    weight[1] = 1
    result = linear(isa, x, weight, group_size=65536)
    torch.testing.assert_close(result, torch.tensor([[-65536.0, 65536.0]]).expand(2, 2), rtol=0.005, atol=0)


def test_activations_have_any_number_of_dimensions(isa, subtests):
    for shape in [(520,), (1, 520), (2, 3, 520), (2, 1, 3, 520), (0, 520), (2, 0, 520)]:
        with subtests.test(shape=shape):
            x, weight = torch.randn(shape), torch.randn(70, 520)
            actual = linear(isa, x, weight)
            assert actual.shape == (*shape[:-1], 70)
            assert torch.equal(actual.reshape(-1, 70), linear(isa, x.reshape(-1, 520), weight))
            kernel = kernel_of("matmul", 32, isa)
            assert torch.equal(
                run_prepacked(kernel, kernel.prepack(weight.t()), x, weight.t(), dtype=torch.float32), actual
            )


LAYOUTS = {
    "transposed": lambda rows, columns: torch.randn(columns, rows).t(),
    "expanded": lambda rows, columns: torch.randn(1, columns).expand(rows, columns),
    "one number": lambda rows, columns: torch.randn(1, 1).expand(rows, columns),
    "overlapping": lambda rows, columns: torch.randn(rows + columns).as_strided((rows, columns), (1, 1)),
    "steps": lambda rows, columns: torch.randn(2 * rows, 3 * columns)[::2, ::3],
    "slice": lambda rows, columns: torch.randn(rows, columns + 3)[:, 1 : columns + 1],
}


def test_each_layout_is_right(subtests):
    for left, right in itertools.product(LAYOUTS, LAYOUTS):
        with subtests.test(left=left, right=right):
            x, weight = LAYOUTS[left](20, 130), LAYOUTS[right](70, 130)
            actual = check(None, x, weight)
            mm = kernel_of("mm")
            assert torch.equal(run_prepacked(mm, mm.prepack(weight.t()), x, weight.t(), dtype=torch.float32), actual)


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (2, -0.5), (0, 3), (0.25, 0)])
def test_addmm_applies_beta_and_alpha_before_it_rounds(isa, beta, alpha, subtests):
    for bias in [(70,), (1, 70), (5, 1), (5, 70), (1,), ()]:
        with subtests.test(bias=bias):
            x, weight, added = torch.randn(5, 130), torch.randn(70, 130), torch.randn(bias)
            kernel = kernel_of("addmm", 32, isa)
            args = (added if beta else added * NAN, x, weight.t(), beta, alpha)
            assert kernel.unsupported_reason(*args) is None
            actual = run_prepacked(kernel, kernel.prepack(weight.t()), *args, dtype=torch.bfloat16)
            expected = beta * added.double() + alpha * linear(isa, x, weight).double()
            torch.testing.assert_close(actual.double(), expected.expand(5, 70), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("threads", range(1, 9))
def test_the_number_of_threads_makes_no_difference(isa, threads, subtests):
    for rows in [1, 3, 8, 300]:
        with subtests.test(rows=rows):
            torch.manual_seed(0)
            x, weight = torch.randn(rows, 900), torch.randn(500, 900)
            expected, before = linear(isa, x, weight), torch.get_num_threads()
            try:
                torch.set_num_threads(threads)
                assert torch.equal(linear(isa, x, weight), expected)
            finally:
                torch.set_num_threads(before)


@pytest.mark.parametrize("group_size", [16, 32, 64, 128])
def test_a_prepacked_weight_takes_little_more_than_half_a_byte_for_each_element(group_size):
    values, factors = kernel_of("linear", group_size).prepack(torch.randn(256, 2048))
    assert values.nbytes * 8 / (256 * 2048) == 4 + 8 / group_size + 16 / 256
    assert factors.numel() == 0


def test_prepacked_weights_of_each_layout_and_group_size_have_keys_of_their_own():
    keys = {op: kernel_of(op).prepack_key for op in ("linear", "matmul", "mm", "addmm")}
    assert keys["matmul"] == keys["mm"] == keys["addmm"] != keys["linear"]
    assert kernel_of("linear", 64).prepack_key != keys["linear"]


@pytest.mark.parametrize("values", [(INF,), (-INF,), (INF, -INF), (INF, INF, INF), (NAN,), (INF, NAN)], ids=str)
@pytest.mark.parametrize("rows", [6, 20])
def test_inf_and_nan_come_to_what_they_come_to_with_the_quantized_weight(isa, rows, values, subtests):
    for dtype in FLOATS:
        with subtests.test(dtype=dtype):
            torch.manual_seed(0)
            x, weight = torch.randn(rows, 300).to(dtype), torch.randn(70, 300)
            clean = x.clone()
            x[2, 7 : 7 + len(values)] = torch.tensor(values).to(dtype)
            clean[2] = 0
            integers, scales = reference.unpack(kernel_of("linear").prepack(weight)[0], 70, 300, 32)
            quantized = integers * scales.repeat_interleave(256, 1)[:, :300]
            actual = linear(isa, x, weight)
            only = torch.where(x[2].isfinite(), 0, x[2].float())[:, None]
            expected = torch.where(only == 0, 0, only * quantized.t()).sum(0)
            assert torch.equal(actual[2].nan_to_num(7), expected.nan_to_num(7))
            others = [row for row in range(rows) if row != 2]
            assert torch.equal(actual[others], linear(isa, clean, weight)[others])


@pytest.mark.parametrize("rows", [3, 20])
def test_activations_of_any_size_are_right(isa, rows, subtests):
    for factor in [1e-45, 1e-40, 1e-30, 1e30]:
        with subtests.test(factor=factor):
            x, weight = torch.randn(rows, 300) * factor, torch.randn(70, 300)
            check(isa, x, weight)
            x[:, 256:] = 0
            check(isa, x, weight)


def test_weights_of_any_size_are_right(isa, subtests):
    for factor in [1e-45, 1e-40, 1e-30, 1e29]:
        with subtests.test(factor=factor):
            x, weight = torch.randn(5, 300), torch.randn(70, 300)
            weight[::2] *= factor
            check(isa, x, weight)


@pytest.mark.parametrize("rows", [1, 20])
def test_zeros_give_the_bias(isa, rows):
    x, weight, bias = torch.randn(rows, 300), torch.randn(70, 300), torch.randn(70)
    assert torch.equal(linear(isa, x * 0, weight, bias), bias.expand(rows, 70))
    assert torch.equal(linear(isa, x, weight * 0, bias), bias.expand(rows, 70))


@pytest.mark.parametrize("value", [INF, -INF, NAN, 2.0**101])
def test_a_weight_with_inf_or_nan_or_what_is_too_large_is_not_packed(value):
    weight = torch.randn(70, 130)
    weight[69, 129] = value
    assert kernel_of("linear").prepack(weight) is None
    assert kernel_of("mm").prepack(weight.t()) is None


def test_sums_that_may_not_fit_are_declined():
    terms = torch.ones(1, 65537)
    reason = "its sums have more than 65536 terms, which may not fit 32 bits"
    assert kernel_of("linear").unsupported_reason(terms, terms, None) == reason


def test_factors_multiply_the_weight_and_divide_the_activations(isa, subtests):
    for rows in [1, 5, 20]:
        with subtests.test(rows=rows):
            x, weight = torch.randn(rows, 300), torch.randn(70, 300)
            factors = 2.0 ** (torch.arange(300) * 7 % 11)  # powers of two: multiplying by them rounds nothing
            kernel = kernel_of("linear", 32, isa)
            actual = run_prepacked(kernel, kernel.prepack(weight, factors), x, weight, None, dtype=torch.float32)
            assert torch.equal(actual, linear(isa, x / factors, weight * factors))
            x[0, 5] = INF
            assert (
                not run_prepacked(kernel, kernel.prepack(weight, factors), x, weight, None, dtype=torch.float32)[0]
                .isfinite()
                .any()
            )


def test_the_error_is_that_of_four_bits(isa):
    torch.manual_seed(0)
    x, weight = torch.randn(64, 2048), torch.randn(256, 2048)
    expected = F.linear(x, weight)
    error = (linear(isa, x, weight) - expected).norm() / expected.norm()
    assert 0.07 < error < 0.09


X, WEIGHT, BIAS = torch.randn(5, 130), torch.randn(70, 130), torch.randn(70)
CALLS = {
    "linear": (torch.randn(2, 3, 130), WEIGHT, BIAS),
    "matmul": (torch.randn(2, 3, 130), WEIGHT.t()),
    "mm": (X, WEIGHT.t()),
    "addmm": (BIAS, X, WEIGHT.t(), 0.5, 2),
}


@pytest.mark.parametrize("op", CALLS)
def test_an_operator_is_as_its_fake_one(op):
    kernel, args = kernel_of(op), CALLS[op]
    given = (*args, *kernel.prepack(args[kernel.weight]), torch.bfloat16, *kernel.constants)
    torch.library.opcheck(kernel.operator, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("x", "weight", "group_size"), [(X[:, 1:7], WEIGHT, 32), (X, WEIGHT[:64], 32), (X, WEIGHT, 64)]
)
def test_an_operator_rejects_a_prepacked_weight_that_does_not_fit(x, weight, group_size):
    packed = kernel_of("linear").prepack(WEIGHT)
    with pytest.raises(RuntimeError, match="the packed weight is not one of"):
        torch.ops.polycast_cpu.int4_linear(x, weight, None, *packed, torch.bfloat16, group_size, 0)


@pytest.mark.parametrize("group_size", [0, -32, 20])
def test_a_group_size_must_be_a_multiple_of_16(group_size):
    with pytest.raises(RuntimeError, match=f"expected a group size that 16 divides, got {group_size}"):
        torch.ops.polycast_cpu.int4_pack(WEIGHT, None, group_size)


def test_there_are_kernels_for_the_recipe():
    recipe = polycast.Int4(64)
    backend = polycast.plugin.get_backend("cpu")
    kernels = {op: first.kernel for op, (first, *_) in polycast.plugin.recipe_kernels(backend, recipe).items()}
    assert set(kernels) == {"aten::linear", "aten::matmul", "aten::mm", "aten::addmm"}
    assert kernels["aten::linear"].constants[0] == 64


@pytest.mark.parametrize("group_size", [32, 256])
@pytest.mark.parametrize("rows", [1, 40])
def test_a_product_without_terms_is_the_bias(isa, rows, group_size):
    weight, bias = torch.empty(70, 0), torch.randn(70)
    values, factors = torch.ops.polycast_cpu.int4_pack(weight, None, group_size)
    result = torch.ops.polycast_cpu.int4_linear(
        torch.empty(rows, 0), weight, bias, values, factors, torch.float32, group_size, isa
    )
    assert torch.equal(result, bias.expand(rows, -1))
