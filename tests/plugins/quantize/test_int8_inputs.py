"""The CPU's int8 kernels on unusual inputs: inf, nan, zeros, very small and very large rows; unsupported calls."""

import pytest
import torch
import torch.nn.functional as F

import polycast
from polycast_plugins.quantize.cpu.int8 import Int8Matmul
from polycast_plugins.testing.low_bit import assert_within

from .low_bit_calls import int8_product, run_kernel

AVAILABLE = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"no int8 here: {AVAILABLE.reason}")

INF, NAN = torch.inf, torch.nan


def kernel_of(op):
    """Return a function that makes a product and returns its kernel of an op."""
    return lambda *how: Int8Matmul(*how).kernels()[f"aten::{op}"]


linear, mm, addmm = map(kernel_of, ("linear", "mm", "addmm"))


def matrices(rows):
    """Return activations and a weight without zeros, whose signs survive quantizing."""
    x, weight = torch.randn(rows, 130), torch.randn(70, 130)
    return x, weight.sign() * (weight.abs() + 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_inf_and_nan_come_to_what_they_come_to_in_bfloat16(isa, by_row, dtype, subtests):
    for values in [(INF,), (-INF,), (INF, -INF), (INF, INF, INF), (NAN,), (INF, NAN)]:
        with subtests.test(values=values):
            x, weight = matrices(6)
            x[2, : len(values)] = torch.tensor(values)
            actual = run_kernel(linear(by_row, isa), x.to(dtype), weight, None, dtype=dtype)[2]
            torch.testing.assert_close(actual.float(), F.linear(x, weight)[2], equal_nan=True)
            assert not actual.isfinite().any()


def test_the_rows_beside_one_with_inf_or_nan_are_what_they_are_without(isa, by_row):
    x, weight = matrices(6)
    clean = x.clone()
    x[2, 7], x[4, 9], clean[2], clean[4] = INF, NAN, 0, 0
    kernel = linear(by_row, isa)
    others = [0, 1, 3, 5]
    assert torch.equal(run_kernel(kernel, x, weight, None)[others], run_kernel(kernel, clean, weight, None)[others])


def test_rows_of_nothing_but_inf_or_nan_are_right(by_row):
    x, weight = torch.full((3, 130), INF), matrices(1)[1]
    x[1], weight[5] = NAN, weight[5].abs()
    result = run_kernel(linear(by_row), x, weight, torch.ones(70))
    assert result[0, 5] == INF
    assert result[[0, 1, 2]].isnan().sum().item() == 3 * 70 - 2


def test_inf_meets_alpha_and_what_is_added(isa):
    x, weight = matrices(5)
    x[1, 3] = INF
    added = torch.zeros(5, 70)
    added[1, 4] = -INF * weight[4, 3].sign() * -1
    args = (added, x, weight.t(), 2, -1)
    torch.testing.assert_close(
        run_kernel(addmm(True, isa), *args)[1], torch.addmm(*args[:3], beta=2, alpha=-1)[1], equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_nan_in_the_bias_stays_one_whatever_its_bits(isa, dtype, subtests):
    for bits in [0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001]:
        with subtests.test(bits=bits):
            x, weight = matrices(3)
            bias = torch.zeros(70)
            bias[5] = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32) if bits > 0 else NAN
            result = run_kernel(linear(True, isa), x, weight, bias, dtype=dtype)
            assert result.isnan().sum().item() == result[:, 5].isnan().sum().item() == 3


def test_rows_of_zeros_give_the_bias(isa, by_row):
    x, weight = matrices(5)
    x[3], bias = 0, torch.randn(70)
    assert torch.equal(run_kernel(linear(by_row, isa), x, weight, bias)[3], bias)
    assert torch.equal(run_kernel(linear(by_row, isa), x * 0, weight, bias), bias.expand(5, 70))


def test_features_of_zeros_give_zeros(isa, by_row):
    x, weight = matrices(5)
    weight[[3, 69]] = 0
    result = run_kernel(linear(by_row, isa), x, weight, None)
    assert result[:, [3, 69]].eq(0).all()
    assert run_kernel(linear(by_row, isa), x, weight * 0, None).eq(0).all()


def test_activations_of_any_size_are_within_the_error(isa, by_row, subtests):
    for factor in [1e-45, 1e-40, 1e-30, 1e30]:
        with subtests.test(factor=factor):
            x, weight = matrices(5)
            x *= factor
            assert_within(run_kernel(linear(by_row, isa), x, weight, None), *int8_product(x, weight, by_row))


def test_weights_of_any_size_are_within_the_error(isa, subtests):
    for factor in [1e-45, 1e-40, 1e-30, 1e29]:
        with subtests.test(factor=factor):
            x, weight = matrices(5)
            weight[::2] *= factor
            assert_within(run_kernel(linear(True, isa), x, weight, None), *int8_product(x, weight, True))


def test_rows_of_very_different_size_do_not_spoil_each_other(isa):
    x, weight = matrices(6)
    x *= torch.tensor([1e-30, 1e-3, 1.0, 1e3, 1e20, 1e-10])[:, None]
    actual, alone = (
        run_kernel(linear(True, isa), x, weight, None),
        torch.cat([run_kernel(linear(True, isa), row[None], weight, None) for row in x]),
    )
    assert torch.equal(actual, alone)
    assert_within(actual, *int8_product(x, weight, True))


def test_with_one_scale_for_the_tensor_small_rows_are_lost(isa):
    x, weight = matrices(2)
    x[0] *= 1e-6
    assert run_kernel(linear(False, isa), x, weight, None)[0].eq(0).all()


def test_a_weight_with_inf_or_nan_or_what_is_too_large_is_not_packed(isa, subtests):
    for value in [INF, -INF, NAN, 2.0**101]:
        with subtests.test(value=value):
            weight = torch.randn(70, 130)
            weight[69, 129] = value
            assert linear(True, isa).prepack(weight) is None
            assert mm(True, isa).prepack(weight.t()) is None


def test_sums_that_may_not_fit_are_declined():
    terms = torch.ones(1, 65537)
    reason = "its sums have more than 65536 terms, which may not fit 32 bits"
    assert (
        linear(True).unsupported_reason(terms, terms, None) == mm(True).unsupported_reason(terms, terms.t()) == reason
    )


def test_a_prepacked_weight_can_be_made_and_used_in_every_mode_of_autograd():
    x, weight = matrices(5)
    kernel = linear(True)
    with torch.inference_mode():
        prepared = kernel.prepack(weight)
    expected = kernel.run(prepared, x, weight, None)
    with torch.no_grad():
        assert torch.equal(kernel.run(kernel.prepack(weight), x, weight, None), expected)
    with torch.inference_mode():
        assert torch.equal(kernel.run(prepared, x, weight, None), expected)
