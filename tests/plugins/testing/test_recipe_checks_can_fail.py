"""Each check of kernels of recipes, on a kernel that is wrong in what it checks: it fails and says what is wrong."""

import contextlib
import re
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensor

import polycast
from polycast.policy import recipe
from polycast_plugins.quantize import LowBitRecipe
from polycast_plugins.testing import BackendConformance, recipe_checks
from polycast_plugins.testing.low_bit import LINEAR_OPS, recipes


def quantized(values, dim):
    sound = values.float().nan_to_num(0.0, 0.0, 0.0)
    scale = (sound.abs().amax() if dim is None else sound.abs().amax(dim, keepdim=True)).clamp(min=1e-30) / 127
    return torch.where(values.isfinite(), (values / scale).round() * scale, values.float())


class Linear(polycast.plugin.LowBitKernel):
    dim = -1

    def prepack(self, weight):
        return (quantized(weight, 1),)

    def unsupported_reason(self, x, weight, bias):
        return None if x.shape[-1] == weight.shape[-1] else "the sizes do not fit"

    def run(self, prepared, x, weight, bias):
        product = F.linear(quantized(x, self.dim), prepared[0], None if bias is None else bias.float())
        return product.to(torch.get_autocast_dtype("cpu"))


def changed(kernel=Linear, **attributes):
    return type("Changed", (kernel,), attributes)()


def with_sign_of_the_first(self, weight):
    first = self.__dict__.setdefault("sign", weight[0, 0].sign())
    return (quantized(weight, 1) * first * weight[0, 0].sign(),)


def with_other_strides(self, *args):
    result = Linear.run(self, *args)
    return result.mT.contiguous().mT if result.dim() > 1 else result


def without_rows(self, prepared, x, *others):
    result = Linear.run(self, prepared, x, *others)
    return result if x.numel() else result.new_zeros(0)


def with_nan_in_all_rows(self, prepared, x, *others):
    return Linear.run(self, prepared, x, *others) + (x * 0).sum().to(torch.get_autocast_dtype("cpu"))


def not_for_fake_tensors(self, x, weight, bias):
    return "it is fake" if isinstance(x, FakeTensor) else Linear.unsupported_reason(self, x, weight, bias)


WRONG = {
    "no kernel": max,
    "no tensor as weight": changed(weight=2),
    "not transposed": changed(run=lambda self, prepared, *args: Linear.run(self, (prepared[0].flip(0),), *args)),
    "without the bias": changed(
        run=lambda self, prepared, x, weight, bias: Linear.run(self, prepared, x, weight, None)
    ),
    "in float32": changed(run=lambda self, *args: Linear.run(self, *args).float()),
    "loses nan": changed(run=lambda self, prepared, x, *args: Linear.run(self, prepared, x.nan_to_num(), *args)),
    "spreads nan": changed(run=with_nan_in_all_rows),
    "looks at values": changed(unsupported_reason=not_for_fake_tensors),
    "never declines": changed(unsupported_reason=lambda *_: None),
    "declines without a reason": changed(unsupported_reason=lambda *args: Linear.unsupported_reason(*args) and ""),
    "other strides": changed(run=with_other_strides),
    "no rows": changed(run=without_rows),
    "keeps the weight": changed(prepack=lambda self, weight: (weight,)),
    "reads the weight": changed(
        run=lambda self, prepared, x, weight, bias: Linear.run(self, self.prepack(weight), x, weight, bias)
    ),
    "writes to the input": changed(run=lambda self, prepared, x, *args: Linear.run(self, prepared, x.mul_(2), *args)),
    "packs nothing": changed(prepack=lambda self, weight: None),
    "packs no tensor": changed(prepack=lambda self, weight: (weight, None)),
    "forgets the sign": changed(prepack=with_sign_of_the_first),
}


YES = polycast.plugin.Availability(True)
CHECKS = [name for name in dir(BackendConformance) if name.startswith("test_recipe")]


@pytest.mark.parametrize("name", CHECKS)
def test_a_kernel_that_is_right_passes(name, engine, check_kernel):
    check_kernel(name, Linear())


@pytest.mark.parametrize(
    ("name", "kernel", "message"),
    [
        ("test_recipe", "no tensor as weight", "its weight is argument 2, which is not a tensor. Set the attribute `w"),
        (
            "test_recipe",
            "no kernel",
            "must map names of ops to instances of polycast.plugin.LowBitKernel, at least one",
        ),
        (
            "test_recipe_product",
            "not transposed",
            "aten::linear by int8 on cpu, of shapes [5, 32], [16, 32], [16], with",
        ),
        ("test_recipe_product", "without the bias", "times the bound of the recipe"),
        ("test_recipe_product", "in float32", "the result is torch.float32, not torch.bfloat16"),
        ("test_recipe_product", "packs nothing", "a tuple of tensors for a finite weight, got None"),
        ("test_recipe_product", "packs no tensor", "a tuple of tensors for a finite weight, got ("),
        (
            "test_recipe_unsupported_reason",
            "looks at values",
            "answers None, and 'it is fake' for the same as fake ten",
        ),
        ("test_recipe_unsupported_reason", "never declines", "must decline activations that do not fit the weight, so"),
        ("test_recipe_unsupported_reason", "declines without a reason", "must return None or a reason, got ''"),
        ("test_recipe_in_compiled_code", "other strides", "strides [1, 5], on cpu, and compiled code expects"),
        ("test_recipe_in_compiled_code", "packs nothing", "did not run in compiled code: the weight cannot be prepack"),
        ("test_recipe_inf_and_nan", "loses nan", "a finite number where the op returns inf or nan"),
        ("test_recipe_inf_and_nan", "spreads nan", "times the bound of the recipe"),
        ("test_recipe_empty_batch", "no rows", "with no rows, returned the shape (0,), expected (0, 16)"),
        ("test_recipe_packing", "keeps the weight", "prepack() returned memory of the weight"),
        ("test_recipe_packing", "reads the weight", "run() read the weight, or returned another result the second"),
        ("test_recipe_packing", "writes to the input", "run() wrote to its arguments"),
        ("test_recipe_in_a_region", "packs nothing", "did not run in a region with Int8("),
        ("test_recipe_in_a_region", "forgets the sign", "after the weight was negated: the error is "),
    ],
)
def test_a_kernel_that_is_wrong(name, kernel, message, check_kernel):
    with pytest.raises(AssertionError, match=re.escape(message)):
        check_kernel(name, WRONG[kernel])


def test_an_operator_that_differs_from_run(check_kernel):
    library = torch.library.Library("polycast_test_wrong", "FRAGMENT")
    library.define("linear(Tensor x, Tensor weight, Tensor? bias, Tensor rows, ScalarType dtype) -> Tensor")
    library.impl("linear", lambda x, weight, bias, rows, dtype: F.linear(x, rows).to(dtype) + 1, "CPU")
    kernel = Linear()
    kernel.operator = torch.ops.polycast_test_wrong.linear.default
    with pytest.raises(AssertionError, match=r"`operator` returns another result than run\(\)"):
        check_kernel("test_recipe_in_a_region", kernel)
    library._destroy()


def test_one_scale_for_all_rows_is_not_what_a_scale_for_each_row_gives(monkeypatch, check_kernel):
    def rows_of_very_different_size(op, *sizes):
        x, weight = torch.randn(3, 32) * torch.tensor([1e-3, 1.0, 1e3])[:, None], torch.randn(16, 32)
        return [[x, weight, None]]

    monkeypatch.setattr(recipe_checks, "arguments_of", rows_of_very_different_size)
    check_kernel("test_recipe_product", Linear())
    with pytest.raises(AssertionError, match="times the bound of the recipe"):
        check_kernel("test_recipe_product", changed(dim=None))


@pytest.mark.parametrize(
    ("name", "answers", "message"),
    [
        (
            "test_availability_of_recipes",
            {"availability": polycast.plugin.Availability(False)},
            "says no and gives no reason. Give one",
        ),
        ("test_recipe", {"kernels": {}}, "at least one; got {}"),
        ("test_recipe", {"op": "aten::exp"}, "has a kernel for aten::exp, which is not LOWER_PRECISION_FP in the"),
    ],
)
def test_a_backend_whose_answers_are_wrong(name, answers, message, check_kernel):
    with pytest.raises(AssertionError, match=re.escape(message)):
        check_kernel(name, Linear(), **answers)


@pytest.mark.parametrize("name", CHECKS)
def test_a_recipe_that_the_device_lacks_is_skipped_with_the_reason(name, check_kernel):
    with pytest.raises(pytest.skip.Exception, match="cpu has no float8: there is int8 only"):
        check_kernel(name, Linear(), recipe="float8")


def test_kernels_whose_arguments_are_not_known_are_reported_as_not_called(check_kernel):
    with pytest.raises(pytest.skip.Exception, match="no kernel for int8 takes the suite's arguments: aten::bmm"):
        check_kernel("test_recipe_product", Linear(), op="aten::bmm")


@pytest.fixture
def forget_kinds(monkeypatch):
    """Forget the kinds of recipes that a test defines."""
    monkeypatch.setattr(recipe, "kinds", {**recipe.kinds})


@pytest.mark.parametrize(
    ("size", "outcome"),
    [
        (1 / 254 * 1.001, contextlib.nullcontext()),
        (0.0, pytest.raises(AssertionError, match="aten::linear by coarse on cpu.* times the bound of the recipe")),
        (
            None,
            pytest.raises(pytest.skip.Exception, match="Coarse does not say how far it rounds: define rounding_err"),
        ),
    ],
    ids=["its errors", "none", "nothing"],
)
def test_kernels_of_another_packages_kind_are_tested_against_its_rounding_errors(
    size, outcome, forget_kinds, check_kernel
):
    class Coarse(LowBitRecipe):
        kind = "coarse"
        ops: Sequence[str] = ("linear",)

        def rounding_errors(self, x, weight):
            if size is None:
                return None
            return x.abs().amax(1, keepdim=True) * size + 0 * x, weight.abs().amax() * size + 0 * weight

    assert "coarse" in recipes()
    with outcome:
        check_kernel("test_recipe_product", Linear(), recipe="coarse", availability=YES)


def test_kernels_for_a_recipe_whose_ops_are_no_setting_are_tested(forget_kinds, check_kernel):
    class Fixed(LowBitRecipe):
        kind = "fixed"
        ops = ("linear",)

        def rounding_errors(self, x, weight):
            return 0 * x, 0 * weight

    with pytest.raises(AssertionError, match="aten::linear by fixed on cpu.* times the bound of the recipe"):
        check_kernel("test_recipe_product", Linear(), recipe="fixed", availability=YES)
    with pytest.raises(pytest.skip.Exception, match="no kernel for fixed takes the suite's arguments: aten::mm"):
        check_kernel("test_recipe_product", Linear(), recipe="fixed", op="aten::mm", availability=YES)


def rounded_to_e4m3(values):
    scale = values.abs().amax() / 448
    return (values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale


@pytest.mark.parametrize("op", LINEAR_OPS)
def test_numbers_of_e4m3_are_within_the_error_of_their_recipe(op):
    product = LINEAR_OPS[op]
    for args in recipe_checks.arguments_of(op, 5, 64, 16):
        expected, error = product.within(recipes()["float8:tensor"], args, random=False)
        given = [arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args]
        for position in (product.activations, product.weight):
            given[position] = rounded_to_e4m3(given[position])
        off = (product(given) - expected).abs()
        assert (off <= error).all()
        assert off.max() > error.max() / 100


# ---- What kernels may offer.


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


class Pointwise(polycast.plugin.LowBitKernel):
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
