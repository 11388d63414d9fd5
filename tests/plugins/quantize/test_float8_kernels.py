"""CUDA's float8 kernels without a GPU: values on the CPU, dtypes and shapes on fake tensors, unsupported calls."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import polycast
from polycast_plugins.quantize.cuda import float8
from polycast_plugins.quantize.cuda.float8 import Float8Matmul, cast_with_aten, float8_availability, float8_on
from polycast_plugins.testing.low_bit import assert_within

from .low_bit_calls import float8_product, run_kernel

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = torch.float8_e4m3fn
INF, NAN = torch.inf, torch.nan


def kernel_of(op):
    """Return a function that makes a product and returns its kernel of an op."""
    return lambda *how: Float8Matmul(*how).kernels()[f"aten::{op}"]


linear, matmul, mm, addmm = map(kernel_of, ("linear", "matmul", "mm", "addmm"))


@pytest.fixture
def product(by_row):
    """Skip a test of the product's values where torch has none on the CPU for these scales."""
    values, scale = torch.ones(16, 16).to(FLOAT8), torch.ones(16, 1) if by_row else torch.ones(())
    try:
        torch._scaled_mm(values, values.t(), scale, scale.t() if by_row else scale, out_dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"torch {torch.__version__} cannot compute it on the CPU: {error}")


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("rows", [1, 5, 17])
def test_linear_is_within_the_error_of_float8(by_row, rows, subtests):
    for given, wanted in itertools.product(FLOATS, FLOATS):
        with subtests.test(given=given, wanted=wanted):
            x, weight, bias = torch.randn(rows, 64).to(given), torch.randn(48, 64).to(given), torch.randn(48)
            actual = run_kernel(linear(by_row), x, weight, bias, dtype=wanted)
            expected, error = float8_product(x, weight, by_row)
            # Row-wise products come in bfloat16, and so does what is added to them.
            assert_within(actual, expected + bias.double(), error + (expected.abs() + bias.abs() + error) / 2**8)


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (2, -0.5), (0, 3)])
def test_addmm_scales_what_it_adds_and_what_it_adds_to(by_row, beta, alpha):
    bias, x, weight = torch.full((48,), NAN if beta == 0 else 2.0), torch.randn(5, 64), torch.randn(64, 48)
    actual = run_kernel(addmm(by_row), bias, x, weight, beta, alpha)
    expected, error = float8_product(x, weight.t(), by_row)
    expected = alpha * expected + (0 if beta == 0 else beta * 2.0)
    assert_within(actual, expected, abs(alpha) * error + (expected.abs() + 1) / 2**7)


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64)])
def test_matmul_takes_any_number_of_dimensions(by_row, shape):
    x, weight = torch.randn(shape), torch.randn(64, 48)
    expected, error = float8_product(x.reshape(-1, 64), weight.t(), by_row)
    actual = run_kernel(matmul(by_row), x, weight, dtype=torch.bfloat16)
    assert actual.shape == (*shape[:-1], 48)
    assert_within(actual.reshape(-1, 48), expected, error)


def test_the_weight_is_column_major_whatever_the_op():
    for kernel, shape in ((linear(True), (48, 64)), (mm(True), (64, 48))):
        values, scale = kernel.prepack(torch.randn(shape))
        assert (values.dtype, values.shape, values.stride()) == (FLOAT8, (48, 64), (64, 1))
        assert (scale.dtype, scale.shape) == (torch.float32, (1, 48))


@pytest.mark.parametrize("factor", [0, 1e-45, 1e-30, 1e30])
def test_rows_of_any_size_have_finite_scales_and_values(by_row, factor):
    values, scale = cast_with_aten(torch.randn(5, 64) * factor, by_row)
    assert values.float().isfinite().all()
    assert (scale > 0).all()
    assert scale.isfinite().all()


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_a_row_with_inf_or_nan_is_nan_and_those_beside_it_are_what_they_are_without(by_row, value):
    x, weight = torch.randn(5, 64), torch.randn(48, 64)
    x[2] = 0
    without = run_kernel(linear(by_row), x, weight, None)
    x[2, 7] = value
    actual = run_kernel(linear(by_row), x, weight, None)
    assert actual[2].isnan().all()
    assert torch.equal(actual[[0, 1, 3, 4]], without[[0, 1, 3, 4]])


@pytest.mark.parametrize("value", [INF, NAN])
def test_a_weight_with_inf_or_nan_is_not_cast(by_row, value):
    weight = torch.randn(48, 64)
    weight[3, 4] = value
    assert linear(by_row).prepack(weight) is None


CALLS = {
    "linear": (linear, lambda x, weight, bias: (x, weight, bias)),
    "matmul": (matmul, lambda x, weight, bias: (x, weight.t())),
    "mm": (mm, lambda x, weight, bias: (x.view(10, 64), weight.t())),
    "addmm": (addmm, lambda x, weight, bias: (bias, x.view(10, 64), weight.t(), 1, 1)),
}


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize(("given", "wanted"), list(itertools.product(FLOATS, FLOATS)), ids=str)
def test_on_fake_tensors_of_cuda_dtypes_and_shapes_are_right(monkeypatch, by_row, op, given, wanted):
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device_type: wanted)
    monkeypatch.setattr("polycast_plugins.quantize.cuda.float8._fused", lambda: None)
    kernel, call = CALLS[op]
    with FakeTensorMode():
        x, weight, bias = (torch.empty(s, dtype=given, device="cuda") for s in ((2, 5, 64), (48, 64), (48,)))
        scale = torch.ones((1, 48) if by_row else (), device="cuda")
        args = call(x, weight, bias)
        assert kernel(by_row).unsupported_reason(*args) is None
        result = kernel(by_row).run((torch.empty((48, 64), dtype=FLOAT8, device="cuda"), scale), *args)
    assert (result.dtype, result.device.type) == (wanted, "cuda")
    assert result.shape == ((10, 48) if op in ("mm", "addmm") else (2, 5, 48))


X, WEIGHT = torch.randn(5, 64), torch.randn(48, 64)
DECLINED = {
    "the weight's sizes, 48 and 72, are not both multiples of 16": (
        linear,
        torch.ones(5, 72),
        torch.ones(48, 72),
        None,
    ),
    "the weight's sizes, 40 and 64, are not both multiples of 16": (mm, X, torch.randn(64, 40)),
    "a tensor is empty": (linear, torch.randn(0, 64), WEIGHT, None),
    "the bias is not a vector of the output features": (addmm, torch.randn(5, 48), X, WEIGHT.t(), 1, 1),
}


@pytest.mark.parametrize("reason", DECLINED)
def test_what_is_declined_has_a_reason_on_real_and_on_fake_tensors(reason):
    kernel, *args = DECLINED[reason]
    assert kernel(True).unsupported_reason(*args) == reason
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        assert kernel(True).unsupported_reason(*fake) == reason


@pytest.mark.parametrize(
    ("capabilities", "scales", "reason"),
    [
        (((8, 0), (9, 0)), "row", "a GPU of compute capability 8.0 has no float8: it takes 8.9"),
        (
            ((9, 0), (12, 0)),
            "row",
            'torch\'s row-wise float8 product fails on compute capability 12.0: use Float8(scales="tensor")',
        ),
    ],
)
def test_gpus_that_cannot_are_told_with_the_reason(capabilities, scales, reason):
    assert float8_on(*capabilities, scales) == polycast.plugin.Availability(False, reason)


@pytest.mark.parametrize(("capability", "scales"), [((8, 9), "row"), ((9, 0), "row"), ((12, 0), "tensor")])
def test_gpus_that_can_are_told_to_be_experimental(capability, scales):
    answer = float8_on(capability, capability, scales)
    assert answer.available
    assert "experimental" in answer.reason


def test_torch_without_a_gpu_and_with_another_product_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert float8_availability("row").reason == "no CUDA device is visible"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "ROCm" in float8_availability("row").reason
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(float8, "_SCHEMA", "another")
    assert "has an unknown signature" in float8_availability("row").reason
