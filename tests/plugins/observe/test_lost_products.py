"""Products in a backward pass that underflow to zero, as `observe(numerics=True)` counts them."""

import pytest
import torch

import polycast

SMALLEST_NORMAL = 2.0**-14  # of float16


def the_record(seen, **fields):
    (record,) = [each for each in seen.numerics if all(getattr(each, name) == value for name, value in fields.items())]
    return record


def test_zeros_of_products_underflow_unless_a_row_or_column_is_zero(engine):
    a, b = torch.full((4, 3), 2e-4), torch.full((3, 5), 2e-4)
    a[1], b[:, 2] = 0, 0
    left, right = a.half().requires_grad_(), torch.eye(3).half().requires_grad_()
    with polycast.observe(numerics=True) as seen:
        torch.mm(left, right).backward(torch.ones(4, 3).half() * 0)
        torch.mm(right, left.t()).backward(b[:, :4].half())
    record = the_record(seen, op="aten::mm")
    # Of the second one: the gradient of `right`, b[:, :4] @ a, and of left.t(), which is right.t() @ b[:, :4].
    product = b[:, :4].half().double() @ a.half().double()
    assert bool((product > 0).all())
    assert (record.zeroed, record.underflowed) == (0, int((product.abs() < SMALLEST_NORMAL).sum()))


def test_products_that_are_lost_are_counted(engine):
    left, right = torch.full((4, 3), 2e-5).half().requires_grad_(), torch.eye(3).half().requires_grad_()
    gradient = torch.full((4, 3), 2e-5)
    gradient[1] = 0
    with polycast.observe(numerics=True) as seen:
        torch.mm(left, right).backward(gradient.half())
    record = the_record(seen, op="aten::mm")
    # left.t() @ gradient is all lost; gradient @ right.t() has a row of zeros and 9 subnormal elements.
    assert (record.count, record.zeroed, record.underflowed) == (9 + 12, 9, 18)


def test_products_that_are_lost_in_batches_are_counted(engine):
    torch.manual_seed(0)
    left, right = (torch.randn(2, 4, 3) * 3e-4).half(), (torch.randn(2, 4, 5) * 3e-4).half()
    left[0, 1], left[1, :, 2], right[1, 2] = 0, 0, 0
    weight, x = torch.eye(4).half().expand(2, 4, 4).clone(), left.clone().requires_grad_()
    with polycast.observe(numerics=True) as seen:
        torch.bmm(weight.transpose(1, 2), x).backward(right[:, :, :3])
        torch.bmm(x.transpose(1, 2), torch.zeros(2, 4, 5).half().requires_grad_()).backward(torch.ones(2, 3, 5).half())
    record = the_record(seen, op="aten::bmm")
    exact = [
        weight.double() @ right[:, :, :3].double(),
        torch.zeros(2, 4, 3).double(),
        x.detach().double() @ torch.ones(2, 3, 5).double(),
    ]
    rounded = torch.cat([each.flatten() for each in exact]).half()
    nonzero = torch.cat([each.flatten() for each in exact]) != 0
    assert record.zeroed == int(((rounded == 0) & nonzero).sum())
    assert record.underflowed == int(((rounded.abs() < SMALLEST_NORMAL) & nonzero).sum())


class _MultiplyInRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with polycast.autocast("cpu", torch.float16):
            return torch.mm(gradient, torch.eye(3) * 1e-6).float()


def test_products_of_inputs_that_autocast_casts_are_counted(engine):
    gradient = torch.full((2, 3), 1e-3)
    gradient[1] = 0
    with polycast.observe(numerics=True) as seen:
        _MultiplyInRegion.apply(torch.ones(2, 3, requires_grad=True)).backward(gradient)
    record = the_record(seen, op="aten::mm", of="result")
    assert (record.role, record.count, record.zeroed, record.underflowed) == ("backward", 6, 3, 3)


@pytest.mark.parametrize("length", [3, 63, 64, 65, 200])
@pytest.mark.parametrize("transposed", [False, True])
def test_zeros_of_products_of_sparse_values_are_not_lost(engine, length, transposed):
    """After ReLU an element of a small batch may have no product of two values that are not zero."""
    generator = torch.Generator().manual_seed(length)
    share = (2 / length) ** 0.5  # two products of each element on average
    left, right = (
        (torch.rand(shape, generator=generator) < share)
        * torch.where(torch.rand(shape, generator=generator) < 0.5, 1, 1e-6)
        for shape in ((20, length), (length, 300))
    )
    left, right = left.half(), right.half()
    if transposed:
        left, right = left.t().contiguous().t(), right.t().contiguous().t()
    with polycast.observe(numerics=True) as seen:
        torch.mm(left.t(), torch.zeros(20, 300).half().requires_grad_()).backward(right)
    record = the_record(seen, op="aten::mm")
    result, products = left @ right, left.ne(0).double() @ right.ne(0).double()
    assert 0 < int((products == 0).sum()) < products.numel()
    assert record.zeroed == int(((result == 0) & (products != 0)).sum()) > 0
