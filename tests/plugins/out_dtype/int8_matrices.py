"""Ops that multiply matrices, and int8 matrices to call them with."""

import torch

from polycast import out_dtype

ATEN = torch.ops.aten
MM, BMM, ADDMM, LINEAR = ATEN.mm.default, ATEN.bmm.default, ATEN.addmm.default, ATEN.linear.default
OPERATOR = torch.ops.higher_order.out_dtype


def int8(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def same(actual, expected):
    """Compare bit for bit."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.equal(actual, expected)


def outcome(function, *args):
    """Return the result of a call, or the type and the text of its exception."""
    try:
        return function(*args)
    except Exception as error:
        return type(error), str(error)


def same_as_torchs(op, dtype, *args):
    same(out_dtype(op, dtype, *args), OPERATOR(op, dtype, *args))
