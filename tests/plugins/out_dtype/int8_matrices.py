"""Ops that multiply matrices, and int8 matrices to call them with."""

import torch

ATEN = torch.ops.aten
MM, BMM, ADDMM, LINEAR = ATEN.mm.default, ATEN.bmm.default, ATEN.addmm.default, ATEN.linear.default
OPERATOR = torch.ops.higher_order.out_dtype


def int8(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def same(actual, expected):
    """Compare bit for bit."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.equal(actual, expected)
