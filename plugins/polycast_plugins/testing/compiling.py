"""Checks of regions inside and around functions that torch compiles."""

from collections.abc import Callable

import pytest
import torch

from .subject import Device, Subject, require


class CompileChecks(Subject):
    """torch.compile, with backends that generate no code: the checks are of what is traced."""

    # The warning is about Python, not about the backend.
    @pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
    @pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
    def test_region_inside_a_compiled_function(self, device: Device, compiler: str) -> None:
        """A region in a compiled function does what it does in eager mode."""

        def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with device.region():
                return torch.mm(x, y)

        _must_compile(device, function, compiler)

    @pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
    def test_region_around_a_compiled_function(self, device: Device, compiler: str) -> None:
        """A compiled function that is called in a region does what it does in eager mode."""

        def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, y)

        with device.region():
            _must_compile(device, function, compiler)


def _must_compile(
    device: Device, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], compiler: str
) -> None:
    device.skip_if_fake("torch.compile runs its graphs on real tensors")
    before = device.state()
    x, y = device(4, 4), device(4, 4)
    plain = function(x, y)
    torch.compiler.reset()
    try:
        compiled = torch.compile(function, backend=compiler)(x, y)
    finally:
        torch.compiler.reset()
    device.must_be(before, f"after a function compiled with {compiler}")
    require(
        compiled.dtype is plain.dtype,
        f"compiled with {compiler}, mm on {device.type} gave {compiled.dtype}; in eager mode it gives {plain.dtype}",
    )
    torch.testing.assert_close(device.values(compiled), device.values(plain))
