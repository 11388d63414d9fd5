"""Checks of kernels whose output dtype differs from that of their inputs."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from polycast.plugin import Backend, dtype_name

from .samples import Sample, split
from .subject import Device, Subject, describe, require


def _products(i: int, j: int, k: int) -> Mapping[str, Sample]:
    """Return arguments for products of an i x j matrix with a j x k matrix."""
    return {
        "aten::mm": lambda m: (m(i, j), m(j, k)),
        "aten::matmul": lambda m: (m(i, j), m(j, k)),
        "aten::linear": lambda m: (m(i, j), m(k, j)),
        "aten::mv": lambda m: (m(i, j), m(j)),
        "aten::bmm": lambda m: (m(2, i, j), m(2, j, k)),
        "aten::addmm": lambda m: (m(i, k), m(i, j), m(j, k)),
        "aten::baddbmm": lambda m: (m(2, i, k), m(2, i, j), m(2, j, k)),
    }


# Some are odd.
_SIZES = tuple(_products(*sizes) for sizes in [(32, 32, 32), (32, 64, 16), (3, 5, 7)])


def _name(op: torch._ops.OpOverload) -> str:
    name: str = op.name()  # type: ignore[no-untyped-call]
    return name


def kernel_names(backend: Backend) -> dict[str, tuple[torch._ops.OpOverload, torch.dtype, torch.dtype]]:
    """Return the keys of a backend's kernels, by the names that test ids and files of expected failures have."""
    return {
        f"{_name(op)}:{dtype_name(taken)}:{dtype_name(given)}": (op, taken, given)
        for op, taken, given in backend.kernels
    }


class KernelChecks(Subject):
    """Kernels with an output dtype."""

    def test_kernel(self, device: Device, kernel: str | None) -> None:
        """A kernel returns the op's float64 result, for integers int64, rounded to the output dtype."""
        if kernel is None:
            pytest.skip(f"the backend of {device.type} has no kernels")
        op, taken, _ = kernel_names(device.backend)[kernel]
        name = _name(op)
        samples = [self.samples[name]] if name in self.samples else [size[name] for size in _SIZES if name in size]
        if not samples:
            pytest.skip(f"{name} was not called: no arguments for it are known. Give them in the attribute `samples`.")
        torch.default_generator.manual_seed(0)
        called = [
            _must_be_exact(device, kernel, (args, kwargs), layout)
            for args, kwargs in [split(make(_Integers(taken))) for make in samples]
            for layout in _LAYOUTS
        ]
        if not any(called):
            pytest.skip(f"{kernel} does not take the suite's arguments. Give it others in the attribute `samples`.")


def _must_be_exact(device: Device, kernel: str, arguments: tuple[Any, Any], layout: str) -> bool:
    """Fail unless a kernel computes its op, for arguments in a layout; return whether it takes them."""
    op, taken, given = kernel_names(device.backend)[kernel]
    args, kwargs = arguments
    exact = taken.is_floating_point or taken.is_complex
    expected = op(*_to(torch.float64 if exact else torch.int64, args), **kwargs).to(given)
    on_device = tree_map_only(torch.Tensor, lambda leaf: _LAYOUTS[layout](device.put(leaf)), _to(taken, args))
    found = device.backend.kernels[op, taken, given](*on_device, **kwargs)
    if found is NotImplemented:
        return False
    sizes = ", ".join(str(list(leaf.shape)) for leaf in args if isinstance(leaf, torch.Tensor))
    how = f"{kernel} on {device.type}, with {layout} inputs of shapes {sizes},"
    require(
        isinstance(found, torch.Tensor) and (found.dtype, found.shape) == (given, expected.shape),
        f"{how} must return {describe(expected)}, got {describe(found)}",
    )
    if not device.fake:
        try:
            torch.testing.assert_close(device.values(found), expected)
        except AssertionError as error:
            raise AssertionError(f"{how} is not {_name(op)}: {error}") from None
    return True


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its last two dimensions swapped in memory."""
    return tensor if tensor.dim() < 2 else tensor.mT.contiguous().mT


_LAYOUTS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": _transposed,
}


def _to(dtype: torch.dtype, tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda leaf: leaf.to(dtype), tree)


class _Integers:
    """Makes integers; sums of their products overflow an integer dtype, and are exact in a floating-point one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._high = 4 if dtype.is_floating_point or dtype.is_complex else 100
        self._low = -self._high if dtype.is_signed else 0

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randint(self._low, self._high + 1, shape).to(torch.float32)

    def spd(self, size: int) -> torch.Tensor:
        return 4 * torch.eye(size)

    def signs(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 2, shape).to(torch.float32) * 2 - 1

    def integers(self, values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)
