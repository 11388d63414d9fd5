"""Autograd history for casts that were made without one."""

from typing import Any

import torch


class _WithHistory(torch.autograd.Function):
    """A cast on the memory of another one, with the history of ``weight.to(dtype)``."""

    @staticmethod
    def forward(weight: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
        return cast.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.dtype), None


def with_history(weight: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the memory of a cast, with the history of casting the weight or view."""
    result: torch.Tensor = _WithHistory.apply(weight, cast)  # type: ignore[no-untyped-call]
    return result
