"""The CPU's int4 matmuls: random products, how weights are packed, inf and nan, and refused calls."""

import itertools
import random
import re

import pytest
import torch
import torch.nn.functional as F

from .matmul_kinds import INT8, Int4, chunk_of, int4_quantized, unpack

pytestmark = pytest.mark.skipif(not INT8, reason=f"no int4 here: {INT8.reason}")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INF, NAN = torch.inf, torch.nan


def prepack(weight, group_size=32):
    return Int4(None, group_size).kernel("linear").prepack(weight)


def test_random_products_are_those_of_the_definition_and_rows_alone_have_the_same_bits(isa, subtests):
    for part in range(16):
        with subtests.test(part=part):
            pick = random.Random(part)
            torch.manual_seed(part)
            for _ in range(40):
                rows = pick.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 25, 32, 40, 70, 257))
                terms, columns = pick.choice((1, 8, 31, 200, 600)), pick.choice((1, 60, 130))
                terms, columns = terms + pick.randrange(70), columns + pick.randrange(6)
                group_size = pick.choice((16, 32, 32, 48, 64, 128, 256, 512))
                x = (torch.randn(rows, terms) * 10 ** pick.uniform(-6, 6)).to(pick.choice(FLOATS))
                x = x if x.isfinite().all() else x.nan_to_num(1, 1, 1)
                weight = torch.randn(columns, terms) * torch.rand(columns, 1) ** 4
                weight = weight if pick.random() < 0.5 else weight.t().contiguous().t()
                bias = torch.randn(columns) if pick.random() < 0.5 else None
                dtype = pick.choice(FLOATS)
                kind = Int4(isa, group_size)
                actual = kind.check(x, weight, bias, dtype)
                row = pick.randrange(rows)
                assert torch.equal(kind.linear(x[row], weight, bias, dtype), actual[row])


@pytest.mark.parametrize("scale", [1.0, 1e-38, 1e-30, 1e28])
def test_a_weight_is_packed_into_the_nearest_values_of_the_definition(scale, subtests):
    for group_size in [16, 32, 48, 64, 128, 256, 512, 4096]:
        with subtests.test(group_size=group_size):
            torch.manual_seed(group_size)
            weight = torch.randn(70, 700) * (1 + 20 * torch.rand(700) ** 8) * scale
            weight[3], weight[4, :300] = 0, 0
            values, _ = prepack(weight, group_size)
            integers, scales = unpack(values, 70, 700, group_size)
            expected, expected_scales = int4_quantized(weight, group_size)
            assert torch.equal(scales, expected_scales)
            by_chunk = scales.repeat_interleave(chunk_of(700, group_size)[1], 1)[:, :700]
            target = weight / by_chunk
            differs = (integers != expected).any(1)
            errors = [(each - target)[differs].double().square().sum(1) for each in (integers, expected)]
            torch.testing.assert_close(*errors, rtol=1e-4, atol=0)  # multipliers of equal errors, but for rounding
            assert differs.float().mean() < 0.1
            assert (integers[3] == 0).all()


@pytest.mark.parametrize("group_size", [16, 32, 64, 256])
def test_the_largest_sums_do_not_overflow(isa, group_size):
    for rows, of_x, of_weight in itertools.product((1, 12), (127.0, -127.0), (120.0, -120.0)):
        x, weight = torch.full((rows, 4096), of_x), torch.full((3, 4096), of_weight)
        weight[1, ::group_size] = of_weight / -16
        Int4(isa, group_size).check(x, weight)


def test_the_longest_sums_of_one_group_do_not_overflow(isa):
    x, weight = torch.ones(2, 65536), torch.full((2, 65536), -1.0)
    weight[1] = 1
    result = Int4(isa, 65536).linear(x, weight)
    torch.testing.assert_close(result, torch.tensor([[-65536.0, 65536.0]]).expand(2, 2), rtol=0.005, atol=0)


@pytest.mark.parametrize("group_size", [16, 32, 64, 128])
def test_a_prepacked_weight_takes_little_more_than_half_a_byte_for_each_element(group_size):
    values, factors = prepack(torch.randn(256, 2048), group_size)
    assert values.nbytes * 8 / (256 * 2048) == 4 + 8 / group_size + 16 / 256
    assert factors.numel() == 0


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
            expected = Int4(isa).linear(clean, weight)
            integers, scales = unpack(prepack(weight)[0], 70, 300, 32)
            quantized = integers * scales.repeat_interleave(256, 1)[:, :300]
            only = torch.where(x[2].isfinite(), 0, x[2].float())[:, None]
            expected[2] = torch.where(only == 0, 0, only * quantized.t()).sum(0)
            assert torch.equal(Int4(isa).linear(x, weight).nan_to_num(7), expected.nan_to_num(7))


def test_levels_are_packed_as_they_are_given(subtests):
    for group_size, terms in ((32, 700), (64, 257), (128, 30), (32, 8), (16, 1)):
        with subtests.test(group_size=group_size, terms=terms):
            torch.manual_seed(terms)
            groups, (_, chunk) = -(-terms // group_size), chunk_of(terms, group_size)
            levels, multipliers = torch.randint(-8, 8, (70, terms)), torch.randint(-15, 16, (70, groups))
            scales = torch.rand(70, -(-terms // chunk)).bfloat16()
            pairs = F.pad(levels + 8, (0, terms % 2)).to(torch.uint8)
            given = pairs[:, ::2] | pairs[:, 1::2] << 4, multipliers.to(torch.int8), scales
            factors = torch.rand(terms) + 1
            values, inverse = torch.ops.polycast_cpu.int4_pack_levels(*given, factors, terms, group_size)
            integers, found = unpack(values, 70, terms, group_size)
            assert torch.equal(integers, levels * multipliers.repeat_interleave(group_size, 1)[:, :terms])
            assert torch.equal(found, scales.float())
            assert torch.equal(inverse, factors.reciprocal())


GIVEN = torch.zeros(3, 20, dtype=torch.uint8), torch.ones(3, 2, dtype=torch.int8), torch.ones(3, 1).bfloat16()


@pytest.mark.parametrize(
    ("position", "tensor", "message"),
    [
        (0, GIVEN[0][:, :19], "expected 20 pairs of levels for each output feature, contiguous, in Byte, got [3, 19]"),
        (1, GIVEN[1][:2], "expected 2 multipliers for each output feature, contiguous, in Char, got [2, 2]"),
        (1, GIVEN[1] * 16, "expected multipliers of magnitudes up to 15"),
        (1, GIVEN[1] * -128, "expected multipliers of magnitudes up to 15"),
        (2, GIVEN[2].float(), "expected 1 scales for each output feature, contiguous, in BFloat16, got [3, 1] in"),
    ],
)
def test_wrong_levels_are_refused(position, tensor, message):
    given = list(GIVEN)
    given[position] = tensor
    with pytest.raises(RuntimeError, match=re.escape(message)):
        torch.ops.polycast_cpu.int4_pack_levels(*given, None, 40, 32)


X, WEIGHT = torch.randn(5, 130), torch.randn(70, 130)


@pytest.mark.parametrize(
    ("x", "weight", "group_size"), [(X[:, 1:7], WEIGHT, 32), (X, WEIGHT[:64], 32), (X, WEIGHT, 64)]
)
def test_an_operator_rejects_a_prepacked_weight_that_does_not_fit(x, weight, group_size):
    packed = prepack(WEIGHT)
    with pytest.raises(RuntimeError, match="the packed weight is not one of"):
        torch.ops.polycast_cpu.int4_linear(x, weight, None, *packed, torch.bfloat16, group_size, 0)


@pytest.mark.parametrize("group_size", [0, -32, 20])
def test_a_group_size_must_be_a_multiple_of_16(group_size):
    with pytest.raises(RuntimeError, match=f"expected a group size that 16 divides, got {group_size}"):
        torch.ops.polycast_cpu.int4_pack(WEIGHT, None, group_size)


@pytest.mark.parametrize("group_size", [32, 256])
@pytest.mark.parametrize("rows", [1, 40])
def test_a_product_without_terms_is_the_bias(isa, rows, group_size):
    weight, bias = torch.empty(70, 0), torch.randn(70)
    values, factors = torch.ops.polycast_cpu.int4_pack(weight, None, group_size)
    result = torch.ops.polycast_cpu.int4_linear(
        torch.empty(rows, 0), weight, bias, values, factors, torch.float32, group_size, isa
    )
    assert torch.equal(result, bias.expand(rows, -1))
