"""Each check of what kernels may offer, on a kernel that is wrong in what it checks: it fails and says what is."""

import pytest
import torch
import torch.nn.functional as F

from polycast.plugin import LowBitKernel

from .test_recipe_checks_can_fail import Linear, changed, quantized


class Equalized(Linear):
    equalizes = True

    def prepack(self, weight, factors=None):
        factors = torch.ones(weight.shape[1]) if factors is None else factors
        return quantized(weight * factors, 1), factors.reciprocal()

    def run(self, prepared, x, weight, bias):
        return super().run(prepared[:1], x.float() * prepared[1], weight, bias)


class WithLevels(Equalized):
    levels = "rounded"

    def compensate(self, weight, moments):
        return quantized(weight, 1)

    def prepack(self, weight, factors=None, levels=None):
        return super().prepack(weight, factors) if levels is None else (levels, factors.reciprocal())


class OfCast(Linear):
    uses_cast = True

    def run(self, prepared, x, weight, bias):
        product = F.linear(x.float(), prepared[0].float(), None if bias is None else bias.float())
        return product.to(torch.get_autocast_dtype("cpu"))


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            changed(Equalized, prepack=lambda self, weight, factors=None: Equalized.prepack(self, weight)),
            "with the factors of a calibration: the error is",
        ),
        (
            changed(WithLevels, compensate=lambda self, weight, moments: quantized(weight, 1) * 1.5),
            "with levels of the kernel's own: the error is",
        ),
        (Linear(), "takes the factors of a"),
    ],
    ids=["ignores", "other levels", "takes none"],
)
def test_a_kernel_that_equalizes(kernel, message, check_kernel):
    check_kernel("test_recipe_calibration", Equalized())
    check_kernel("test_recipe_calibration", WithLevels())
    with pytest.raises((AssertionError, pytest.skip.Exception), match=message):
        check_kernel("test_recipe_calibration", kernel)


def test_a_kernel_of_the_fast_dtype(check_kernel):
    name = "test_kernels_of_the_fast_dtype"
    check_kernel(name, OfCast())
    with pytest.raises(AssertionError, match="aten::linear by the kernel of torch.bfloat16 on cpu: the error is"):
        check_kernel(name, changed(OfCast, run=lambda self, rows, *args: OfCast.run(self, (rows[0].flip(0),), *args)))
    with pytest.raises(pytest.skip.Exception, match="has no kernels of the fast dtype"):
        check_kernel(name, Linear())


class Pointwise(LowBitKernel):
    weight = 0
    uses_cast = True

    def run(self, prepared, x):
        return F.silu(x)


def test_a_kernel_of_a_pointwise_op(check_kernel):
    name, op = "test_kernels_of_pointwise_ops", "aten::silu"
    check_kernel(name, Pointwise(), op=op)
    with pytest.raises(AssertionError, match="aten::silu by the kernel of torch.bfloat16 on cpu: the result is not"):
        check_kernel(name, changed(Pointwise, run=lambda self, prepared, x: F.silu(x) * 1.01), op=op)
    with pytest.raises(AssertionError, match="aten::silu by the kernel of torch.bfloat16 on cpu: the gradient is not"):
        check_kernel(name, changed(Pointwise, run=lambda self, prepared, x: F.silu(x.detach()) + 0 * x), op=op)
    with pytest.raises(pytest.skip.Exception, match="has no kernels of pointwise ops"):
        check_kernel(name, OfCast())
