"""Each check of kernels of recipes, on a kernel that is wrong in what it checks: it fails and says what is wrong."""

import inspect
import re
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

import polycast
from polycast.policy import recipe
from polycast_backends.cpu import CpuBackend
from polycast_plugins.quantize import LowBitRecipe
from polycast_plugins.testing import BackendConformance, recipe_checks
from polycast_plugins.testing.low_bit import LINEAR_OPS, recipes


def quantized(values, dim):
    sound = values.float().nan_to_num(0.0, 0.0, 0.0)
    scale = (sound.abs().amax() if dim is None else sound.abs().amax(dim, keepdim=True)).clamp(min=1e-30) / 127
    return torch.where(values.isfinite(), (values / scale).round() * scale, values.float())


class Linear(polycast.plugin.LowBitKernel):
    """A linear that is right."""

    dim = -1

    def prepack(self, weight):
        return (quantized(weight, 1),)

    def unsupported_reason(self, x, weight, bias):
        return None if x.shape[-1] == weight.shape[-1] else "the sizes do not fit"

    def run(self, prepared, x, weight, bias):
        product = F.linear(quantized(x, self.dim), prepared[0], None if bias is None else bias.float())
        return product.to(torch.get_autocast_dtype("cpu"))


class NotTransposed(Linear):
    def run(self, prepared, x, weight, bias):
        return super().run((prepared[0].flip(0),), x, weight, bias)


class OneScale(Linear):
    dim = None


class NoBias(Linear):
    def run(self, prepared, x, weight, bias):
        return super().run(prepared, x, weight, None)


class InFloat32(Linear):
    def run(self, *args):
        return super().run(*args).float()


class LosesNan(Linear):
    def run(self, prepared, x, weight, bias):
        return super().run(prepared, x.nan_to_num(), weight, bias)


class SpreadsNan(Linear):
    def run(self, prepared, x, weight, bias):
        return super().run(prepared, x, weight, bias) + (x * 0).sum().to(torch.get_autocast_dtype("cpu"))


class LooksAtValues(Linear):
    def unsupported_reason(self, x, weight, bias):
        from torch._subclasses import FakeTensor

        return "it is fake" if isinstance(x, FakeTensor) else super().unsupported_reason(x, weight, bias)


class NeverDeclines(Linear):
    def unsupported_reason(self, *args):
        return None


class SaysNothing(Linear):
    def unsupported_reason(self, x, weight, bias):
        return "" if x.shape[-1] != weight.shape[-1] else None


class OtherStrides(Linear):
    def run(self, *args):
        result = super().run(*args)
        return result.mT.contiguous().mT if result.dim() > 1 else result


class NoRows(Linear):
    def run(self, prepared, x, weight, bias):
        result = super().run(prepared, x, weight, bias)
        return result if x.numel() else result.new_zeros(0)


class KeepsTheWeight(Linear):
    def prepack(self, weight):
        return (weight,)


class ReadsTheWeight(Linear):
    def run(self, prepared, x, weight, bias):
        return super().run((quantized(weight, 1),), x, weight, bias)


class WritesToTheInput(Linear):
    def run(self, prepared, x, weight, bias):
        return super().run(prepared, x.mul_(2), weight, bias)


class PacksNothing(Linear):
    def prepack(self, weight):
        return None


class PacksNoTensor(Linear):
    def prepack(self, weight):
        return (weight, None)


class ForgetsTheSign(Linear):
    def prepack(self, weight):
        return (quantized(weight, 1) * self.__dict__.setdefault("sign", weight[0, 0].sign()) * weight[0, 0].sign(),)


class Second(Linear):
    weight = 2


def check(name, kernel, recipe="int8", op="aten::linear", **answers):
    """Run one check of the suite on a backend for the CPU that has a kernel."""

    class Wrong(CpuBackend):
        def recipe_availability(self, recipe):
            there = polycast.plugin.Availability(
                recipe.short == "int8", "" if recipe.short == "int8" else "there is int8 only"
            )
            return answers.get("availability", there)

        def low_bit_kernels(self, recipe):
            return answers.get("kernels", {op: kernel})

    polycast.plugin.register_backend(Wrong())
    suite = type("TestWrong", (BackendConformance,), {"backend": "cpu"})()
    method = getattr(suite, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polycast_plugins.testing.recipe_checks._SIZES", [(5, 32, 16)])
        try:
            parameters = inspect.signature(method).parameters
            if "device" not in parameters:
                return method(*[recipe] * ("recipe" in parameters))
            with suite.opened() as device:
                return method(device, recipe)
        finally:
            polycast.plugin.unregister_backend("cpu")


CHECKS = [name for name in dir(BackendConformance) if name.startswith("test_recipe")]


@pytest.mark.parametrize("name", CHECKS)
def test_a_kernel_that_is_right_passes(name, engine):
    check(name, Linear())


@pytest.mark.parametrize(
    ("name", "kernel", "message"),
    [
        (
            "test_recipe",
            Second(),
            "says that its weight is argument 2, which is not a tensor. Set the attribute `weight`",
        ),
        ("test_recipe", max, "must map names of ops to instances of polycast.plugin.LowBitKernel, at least one"),
        (
            "test_recipe_product",
            NotTransposed(),
            "aten::linear by int8 on cpu, of shapes [5, 32], [16, 32], [16], with",
        ),
        ("test_recipe_product", NoBias(), "times the bound of the recipe"),
        ("test_recipe_product", InFloat32(), "the result is torch.float32, not torch.bfloat16"),
        ("test_recipe_product", PacksNothing(), "a tuple of tensors for a finite weight, got None"),
        ("test_recipe_product", PacksNoTensor(), "a tuple of tensors for a finite weight, got ("),
        (
            "test_recipe_unsupported_reason",
            LooksAtValues(),
            "answers None, and 'it is fake' for the same as fake tensors. It may use",
        ),
        (
            "test_recipe_unsupported_reason",
            NeverDeclines(),
            "must decline activations that do not fit the weight, so that torch",
        ),
        ("test_recipe_unsupported_reason", SaysNothing(), "unsupported_reason() must return None or a reason, got ''"),
        ("test_recipe_in_compiled_code", OtherStrides(), "strides [1, 5], on cpu, and compiled code expects"),
        (
            "test_recipe_in_compiled_code",
            PacksNothing(),
            "did not run in compiled code: the weight cannot be prepacked",
        ),
        ("test_recipe_inf_and_nan", LosesNan(), "a finite number where the op returns inf or nan"),
        ("test_recipe_inf_and_nan", SpreadsNan(), "times the bound of the recipe"),
        ("test_recipe_empty_batch", NoRows(), "with no rows, returned the shape (0,), expected (0, 16)"),
        ("test_recipe_packing", KeepsTheWeight(), "prepack() returned memory of the weight"),
        ("test_recipe_packing", ReadsTheWeight(), "run() read the weight, or returned another result the second time"),
        ("test_recipe_packing", WritesToTheInput(), "run() wrote to its arguments"),
        ("test_recipe_in_a_region", PacksNothing(), "did not run in a region with Int8("),
        ("test_recipe_in_a_region", ForgetsTheSign(), "after the weight was negated: the error is "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, polycast.plugin.LowBitKernel) else "",
)
def test_a_kernel_that_is_wrong(name, kernel, message):
    with pytest.raises(AssertionError, match=re.escape(message)):
        check(name, kernel)


def test_an_operator_that_differs_from_run():
    library = torch.library.Library("polycast_test_wrong", "FRAGMENT")
    library.define("linear(Tensor x, Tensor weight, Tensor? bias, Tensor rows, ScalarType dtype) -> Tensor")
    library.impl("linear", lambda x, weight, bias, rows, dtype: F.linear(x, rows).to(dtype) + 1, "CPU")
    kernel = Linear()
    kernel.operator = torch.ops.polycast_test_wrong.linear.default
    with pytest.raises(AssertionError, match=r"`operator` returns another result than run\(\)"):
        check("test_recipe_in_a_region", kernel)
    library._destroy()


def test_one_scale_for_all_rows_is_not_what_a_scale_for_each_row_gives(monkeypatch):
    def rows_of_very_different_size(op, *sizes):
        x, weight = torch.randn(3, 32) * torch.tensor([1e-3, 1.0, 1e3])[:, None], torch.randn(16, 32)
        return [[x, weight, None]]

    monkeypatch.setattr(recipe_checks, "arguments_of", rows_of_very_different_size)
    check("test_recipe_product", Linear())
    with pytest.raises(AssertionError, match="times the bound of the recipe"):
        check("test_recipe_product", OneScale())


def test_a_recipe_that_is_refused_without_a_reason():
    with pytest.raises(AssertionError, match="says no and gives no reason. Give one"):
        check("test_availability_of_recipes", Linear(), availability=polycast.plugin.Availability(False))


def test_a_recipe_that_is_available_and_has_no_kernels():
    with pytest.raises(AssertionError, match="at least one; got {}"):
        check("test_recipe", Linear(), kernels={})


def test_a_kernel_for_an_op_that_is_not_cast_down():
    with pytest.raises(AssertionError, match="has a kernel for aten::exp, which is not LOWER_PRECISION_FP in the"):
        check("test_recipe", Linear(), op="aten::exp")


@pytest.mark.parametrize("name", CHECKS)
def test_a_recipe_that_the_device_lacks_is_skipped_with_the_reason(name):
    with pytest.raises(pytest.skip.Exception, match="cpu has no float8: there is int8 only"):
        check(name, Linear(), recipe="float8")


def test_kernels_whose_arguments_are_not_known_are_reported_as_not_called():
    with pytest.raises(pytest.skip.Exception, match="no kernel for int8 takes the suite's arguments: aten::bmm"):
        check("test_recipe_product", Linear(), op="aten::bmm")


@pytest.fixture
def forget_kinds(monkeypatch):
    """Forget the kinds of recipes that a test defines."""
    monkeypatch.setattr(recipe, "kinds", {**recipe.kinds})


@pytest.mark.parametrize("says", ["its errors", "none", "nothing"])
def test_kernels_of_another_packages_kind_are_tested_against_its_rounding_errors(says, forget_kinds):
    class Coarse(LowBitRecipe):
        kind = "coarse"
        ops: Sequence[str] = ("linear",)

        def rounding_errors(self, x, weight):
            size = {"its errors": 1 / 254 * 1.001, "none": 0.0}.get(says)
            return (
                None
                if size is None
                else (x.abs().amax(1, keepdim=True) * size + 0 * x, weight.abs().amax() * size + 0 * weight)
            )

    def run():
        check("test_recipe_product", Linear(), recipe="coarse", availability=polycast.plugin.Availability(True))

    assert "coarse" in recipes()
    if says == "its errors":
        run()
    elif says == "none":
        with pytest.raises(AssertionError, match="aten::linear by coarse on cpu.* times the bound of the recipe"):
            run()
    else:
        with pytest.raises(pytest.skip.Exception, match=r"Coarse does not say how far it rounds: define rounding_err"):
            run()


def test_kernels_for_a_recipe_whose_ops_are_no_setting_are_tested(forget_kinds):
    class Fixed(LowBitRecipe):
        kind = "fixed"
        ops = ("linear",)

        def rounding_errors(self, x, weight):
            return 0 * x, 0 * weight

    yes = polycast.plugin.Availability(True)
    with pytest.raises(AssertionError, match="aten::linear by fixed on cpu.* times the bound of the recipe"):
        check("test_recipe_product", Linear(), recipe="fixed", availability=yes)
    with pytest.raises(pytest.skip.Exception, match="no kernel for fixed takes the suite's arguments: aten::mm"):
        check("test_recipe_product", Linear(), recipe="fixed", op="aten::mm", availability=yes)


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
