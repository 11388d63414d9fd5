"""float8 kernels on a GPU that has it: values, both casts, and the sizes around the tiles of the product."""

import pytest
import torch

import polycast
from polycast_plugins.quantize.cuda.float8 import Float8Matmul, cast_rows, cast_with_aten
from polycast_plugins.testing.low_bit import assert_within

from ..plugins.quantize.low_bit_calls import float8_product, run_kernel

ROWS = polycast.plugin.check(polycast.plugin.get_backend("cuda"), polycast.Float8())
TENSORS = polycast.plugin.check(polycast.plugin.get_backend("cuda"), polycast.Float8(scales="tensor"))
pytestmark = pytest.mark.skipif(not TENSORS, reason=f"no float8 here: {TENSORS.reason}")


@pytest.fixture(params=["row", "tensor"])
def by_row(request):
    if request.param == "row" and not ROWS:
        pytest.skip(f"no row-wise float8 here: {ROWS.reason}")
    return request.param == "row"


def tensor(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [16, 4096, 5000])
def test_triton_casts_as_aten_does(by_row, dtype, columns):
    matrix = tensor(33, columns, dtype=dtype)
    matrix[3, 4], matrix[5, 6], matrix[7] = torch.inf, torch.nan, 0
    for layout in (matrix, matrix.t().contiguous().t(), matrix[:1].expand(5, -1)):
        (values, scale), (expected, expected_scale) = cast_rows(layout, by_row), cast_with_aten(layout, by_row)
        torch.testing.assert_close(scale, expected_scale)
        torch.testing.assert_close(values.float(), expected.float(), rtol=2**-3, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", ["linear", "matmul", "mm", "addmm"])
@pytest.mark.parametrize("rows", [1, 17, 255, 256, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_are_within_the_error_of_float8(by_row, op, rows, dtype):
    x, weight, bias = tensor(rows, 512), tensor(272, 512), tensor(272)
    calls = {
        "linear": (x, weight, bias),
        "matmul": (x, weight.t()),
        "mm": (x, weight.t()),
        "addmm": (bias, x, weight.t(), 1, 1),
    }
    expected, error = float8_product(x, weight, by_row)
    if op in ("linear", "addmm"):
        expected = expected + bias
    actual = run_kernel(Float8Matmul(by_row).kernels()[f"aten::{op}"], *calls[op], dtype=dtype)
    assert_within(actual, expected, error + (expected.abs() + error) / 2**7)


def test_a_row_with_inf_or_nan_is_nan_and_leaves_the_others_alone(by_row):
    x, weight = tensor(33, 64), tensor(48, 64)
    clean = x.clone()
    clean[2] = 0
    x[2] = 0
    x[2, 7] = torch.inf
    actual, without = (
        run_kernel(Float8Matmul(by_row).kernels()["aten::linear"], each, weight, None) for each in (x, clean)
    )
    assert actual[2].isnan().all()
    others = [i for i in range(33) if i != 2]
    assert torch.equal(actual[others], without[others])
