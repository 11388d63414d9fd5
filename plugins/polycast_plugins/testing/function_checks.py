"""Checks of custom_fwd and custom_bwd."""

from typing import Any

import torch

from polycast import custom_bwd, custom_fwd

from .subject import Device, Subject, require


class FunctionChecks(Subject):
    """Autograd functions decorated with custom_fwd and custom_bwd."""

    def test_custom_function_has_the_state_of_its_region(self, device: Device) -> None:
        """Forward and backward of a decorated function run in the autocast state of the call."""
        device.skip_if_fake("autograd cannot run a backward on an absent device")
        seen: list[dict[str, object]] = []

        class Double(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type=device.type)
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                seen.append(device.state())
                return x + x

            @staticmethod
            @custom_bwd(device_type=device.type)
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                seen.append(device.state())
                return gradient + gradient

        before = device.state()
        x = device(2).requires_grad_()
        with device.region():
            y = Double.apply(x)  # type: ignore[no-untyped-call]
        y.sum().backward()
        device.must_be(before, "after the backward of a decorated function")
        wanted = {"enabled": True, "dtype": device.backend.default_dtype}
        for part, state in zip(("forward", "backward"), seen, strict=True):
            device.must_be(wanted, f"in the {part} of a decorated function", state)

    def test_custom_function_with_cast_inputs(self, device: Device) -> None:
        """With cast_inputs the inputs are cast, and forward runs with autocast disabled."""
        seen: list[tuple[object, torch.dtype]] = []

        class Double(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type=device.type, cast_inputs=torch.float32)
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                seen.append((device.state()["enabled"], x.dtype))
                return x + x

        with device.region():
            Double.apply(device(2).to(device.backend.default_dtype))  # type: ignore[no-untyped-call]
        require(
            seen == [(False, torch.float32)],
            f"forward of a function with cast_inputs=torch.float32, in a region on {device.type}, must run with "
            f"autocast disabled on float32 inputs; (enabled, dtype) was {seen}",
        )
