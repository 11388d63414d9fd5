"""out_dtype has the results and the errors of torch's operator."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polycast import out_dtype

from .int8_matrices import ATEN, LINEAR, MM, OPERATOR, int8, outcome

SQUARE = int8(2, 2)
X, Y = torch.randn(5, 5, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
DTYPES = (torch.int8, torch.uint8, torch.int32, torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64)
OPS = {
    "mm": (MM, lambda x, y: (x, y)),
    "linear": (LINEAR, lambda x, y: (x, y)),
    "mul": (ATEN.mul.Tensor, lambda x, y: (x, y)),
    "mul by a number": (ATEN.mul.Scalar, lambda x, y: (x, 2.5)),
    "div": (ATEN.div.Tensor, lambda x, y: (x, y)),
    "conv2d": (ATEN.conv2d.default, lambda x, y: (x[None, None], y[None, None, :2, :2], None, [2, 1], [1, 1])),
    "a tensor without dimensions": (ATEN.mul.Tensor, lambda x, y: (x, y[0, 0])),
}


@pytest.mark.parametrize("name", OPS)
@settings(deadline=None, max_examples=60)
@given(given=st.sampled_from(DTYPES), other=st.sampled_from(DTYPES), wanted=st.sampled_from(DTYPES))
def test_the_result_is_torchs_bit_for_bit(name, given, other, wanted):
    op, arguments = OPS[name]
    args = arguments((10 * X).to(given), (10 * Y).to(other))
    expected, actual = outcome(OPERATOR, op, wanted, *args), outcome(out_dtype, op, wanted, *args)
    if isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert actual == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduced_dtypes_into_float32_are_as_accurate_as_torchs(dtype):
    a, b = torch.randn(64, 256).to(dtype), torch.randn(256, 32).to(dtype)
    exact = a.double() @ b.double()
    error = (out_dtype(MM, torch.float32, a, b) - exact).abs().max()
    assert error <= (OPERATOR(MM, torch.float32, a, b) - exact).abs().max()


REFUSED = {
    "function": (torch.mm, "out_dtype's first argument must be an OpOverload"),
    "packet": (ATEN.mm, "out_dtype's first argument must be an OpOverload"),
    "list": ([], "out_dtype's first argument must be an OpOverload"),
    "in_place": (ATEN.mul_.Tensor, "out_dtype's first argument needs to be a functional operator"),
    "several_tensors": (ATEN.sort.default, "out_dtype's can only apply to ops that return a single tensor"),
    "unlisted": (ATEN.add.Tensor, "out_dtype only allows the following operators:"),
}


@pytest.mark.parametrize(("op", "text"), REFUSED.values(), ids=REFUSED)
def test_arguments_that_torchs_operator_refuses_raise_the_same_error(op, text):
    error, message = outcome(OPERATOR, op, torch.int32, SQUARE, SQUARE)
    assert error is ValueError
    assert message.startswith(text)
    assert outcome(out_dtype, op, torch.int32, SQUARE, SQUARE) == (error, message)


@pytest.mark.parametrize(
    "args",
    [(int8(2), int8(2, 2)), (int8(2, 2), int8(3, 2)), (int8(1, 2, 2), int8(2, 2)), (int8(2, 2), 3), (int8(2, 2),)],
)
def test_an_op_refuses_its_arguments_as_under_torchs_operator(args):
    error, message = outcome(OPERATOR, MM, torch.int32, *args)
    assert outcome(out_dtype, MM, torch.int32, *args) == (error, message)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        *(
            ((MM, dtype, SQUARE, SQUARE), TypeError, f"dtype must be a torch.dtype, such as torch.int32; got {dtype!r}")
            for dtype in (None, "int32", int)
        ),
        (
            (ATEN.mul.Scalar, torch.int32, 3, 4),
            TypeError,
            "out_dtype needs a tensor to compute on, but aten.mul.Scalar was given (3, 4)",
        ),
        (
            (MM, torch.int32, SQUARE, SQUARE.to("meta")),
            RuntimeError,
            "out_dtype needs all tensors on one device, but aten.mm.default was given some on cpu and meta",
        ),
    ],
)
def test_wrong_arguments_are_an_error(args, error, message):
    assert outcome(out_dtype, *args) == (error, message)


def test_a_tensor_without_dimensions_may_be_elsewhere():
    x = torch.ones(2, 2, dtype=torch.int8, device="meta")
    assert out_dtype(ATEN.mul.Tensor, torch.int32, torch.ones((), dtype=torch.int8), x).device.type == "meta"
