"""Checks of what kernels may offer: products of equalized weights, and kernels of the fast dtype."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from polycast.plugin import LowBitKernel, all_recipes, find_op, recipe_kernels

from .low_bit import LINEAR_OPS, LinearOp, assert_within, call_op, run_prepacked
from .recipe_checks import arguments_of, kernel_calls
from .subject import Device, Subject, require


class KernelOptionChecks(Subject):
    """Kernels with `equalizes` or `uses_cast`. Those of other backends are skipped."""

    def test_recipe_calibration(self, device: Device, recipe: str | None) -> None:
        """A kernel that takes factors multiplies the weight by them, and divides the activations.

        One that takes levels takes those that it gave.
        """
        device.skip_if_fake("there are no values")
        checked = False
        for call in kernel_calls(device, recipe):
            if not call.kernel.equalizes:
                continue
            checked = True
            product, dtype = call.product, device.backend.default_dtype
            expected, error = product.within(call.recipe, call.args)
            channels = call.args[product.activations].shape[-1]
            factors = 2.0 ** torch.randint(-6, 7, (channels,))  # so that nothing is rounded
            args = list(call.args)
            args[product.activations] = args[product.activations] * factors
            args[product.weight] = args[product.weight] / (factors if product.features == 0 else factors[:, None])
            given = call.on(device, args)
            weight = given[product.weight].detach()
            with torch.no_grad():
                prepared = call.prepack(weight, factors)
                without, none = call.prepack(weight), call.prepack(weight, None)
            result = run_prepacked(call.kernel, prepared, *given, dtype=dtype)
            with call.context("with the factors of a calibration"):
                assert_within(device.values(result), expected, error)
            same = len(without) == len(none) and all(map(torch.equal, without, none))
            require(same, f"{call}: prepack(weight, None) returned something else than prepack(weight)")
            if call.kernel.levels:
                matrix = weight.float() if product.features == 0 else weight.float().t()
                compensate = cast("Any", call.kernel).compensate
                levels = compensate(matrix * factors.to(matrix), torch.eye(channels).to(matrix))
                with torch.no_grad():
                    prepared = call.prepack(weight, factors, levels)
                result = run_prepacked(call.kernel, prepared, *given, dtype=dtype)
                with call.context("with levels of the kernel's own"):
                    assert_within(device.values(result), expected, error)
        if not checked:
            pytest.skip(f"no kernel for {recipe} takes the factors of a calibration")

    def test_kernels_of_the_fast_dtype(self, device: Device) -> None:
        """A kernel that multiplies a weight's cast returns the float64 product of the cast, rounded."""
        device.skip_if_fake("there are no values")
        torch.default_generator.manual_seed(0)
        taken = False
        for op, kernel in _kernels_by_cast(device):
            product = LINEAR_OPS.get(op)
            if product is None:
                continue
            for args in [each for rows in (1, 5) for each in arguments_of(op, rows, 64, 48)]:
                for dtype in device.fast_dtypes():
                    taken = _check_fast_kernel(device, kernel, product, args, dtype) or taken
        if not taken:
            pytest.skip("the backend has no kernels of the fast dtype that take the suite's arguments")

    def test_kernels_of_pointwise_ops(self, device: Device) -> None:
        """A kernel of an elementwise op of one tensor returns what torch's op does, and autograd records it."""
        device.skip_if_fake("there are no values")
        torch.default_generator.manual_seed(0)
        taken = False
        for op, kernel in _kernels_by_cast(device):
            for dtype in device.fast_dtypes() if _takes_one_tensor(op) else ():
                taken = _check_pointwise_kernel(device, op, kernel, dtype) or taken
        if not taken:
            pytest.skip("the backend has no kernels of pointwise ops that take the suite's arguments")


def _check_pointwise_kernel(device: Device, op: str, kernel: LowBitKernel, dtype: torch.dtype) -> bool:
    """Check a call of a kernel; return whether the kernel takes it."""
    x = device.put((4 * torch.randn(64, 512)).to(dtype)).requires_grad_()
    overload = find_op(op)
    assert overload is not None  # it takes one tensor
    args = [x, *(argument.default_value for argument in overload._schema.arguments[1:])]
    if kernel.unsupported_reason(*args) is not None:
        return False
    found = run_prepacked(kernel, (x,), *args, dtype=dtype, records=True)
    expected = call_op(op, args)
    where = f"{op} by the kernel of {dtype} on {device.type}"
    require(torch.equal(found, expected), f"{where}: the result is not that of torch")
    gradients = [torch.autograd.grad(each.float().square().sum(), x)[0] for each in (found, expected)]
    try:
        torch.testing.assert_close(*gradients, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    except AssertionError as failure:
        raise AssertionError(f"{where}: the gradient is not that of torch: {failure}") from None
    return True


def _kernels_by_cast(device: Device) -> Iterator[tuple[str, LowBitKernel]]:
    for recipe in all_recipes():
        for op, kernels in recipe_kernels(device.backend, recipe).items():
            yield from ((op, each.kernel) for each in kernels if each.kernel.uses_cast)


def _takes_one_tensor(op: str) -> bool:
    overload = find_op(op)
    return overload is not None and sum("Tensor" in str(each.type) for each in overload._schema.arguments) == 1


def _check_fast_kernel(
    device: Device, kernel: LowBitKernel, product: LinearOp, args: list[Any], dtype: torch.dtype
) -> bool:
    """Check a call of a kernel; return whether the kernel takes it."""
    given = [device.put(arg.clone()) if isinstance(arg, torch.Tensor) else arg for arg in args]
    if kernel.unsupported_reason(*given) is not None:
        return False
    exact = [arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args]
    exact[product.weight] = exact[product.weight].to(dtype).double()
    magnitudes = [arg.abs() if isinstance(arg, torch.Tensor) else abs(arg) if arg is not None else arg for arg in exact]
    error = torch.finfo(dtype).eps * product(magnitudes)  # of activations that are rounded to the dtype
    result = run_prepacked(kernel, (given[product.weight].to(dtype),), *given, dtype=dtype)
    try:
        assert_within(device.values(result), product(exact), error)
    except AssertionError as failure:
        raise AssertionError(f"{product.op} by the kernel of {dtype} on {device.type}: {failure}") from None
    return True
