"""The products by one weight: the activations, and the factors with which their error is the least."""

from typing import NamedTuple

import torch

from ..engine.recipes.equalized import product_arguments
from ..plugins.backend import LowBitKernel
from .activations import Activations

_STRENGTHS = (0.35, 0.5, 0.65, 0.8)
_WORTH = 0.95
"""Factors cost time at each call: they have to lower the error to this part of it."""
_SMALLEST = 2.0**-20
"""The smallest magnitudes of a weight's channels that count, relative to the largest: others hardly matter."""


class Factors(NamedTuple):
    """The factors of a weight, and what they achieve; see `EqualizedWeight`."""

    strength: float
    error: float
    plain_error: float
    factors: torch.Tensor | None


class EqualizedProduct:
    """The products by one weight.

    Attributes:
        matrix: the weight, [N, K].
        activations: what it was multiplied by.
    """

    def __init__(
        self,
        kernel: LowBitKernel,
        op: str,
        weight: torch.Tensor,
        matrix: torch.Tensor,
        generator: torch.Generator,
    ) -> None:
        self._kernel, self._op, self._weight = kernel, op, weight
        self.matrix = matrix
        self.activations = Activations(matrix.shape[1], matrix.device, generator)

    def choose(self) -> Factors | None:
        """Return the factors with which the error is the least; None if the kernel cannot prepack the weight.

        There must be rows of activations.
        """
        rows = self.activations.rows
        expected = rows @ self.matrix.float().t()
        plain_error = self._error(rows, expected, None)
        if plain_error is None:
            return None
        best = Factors(0.0, plain_error, plain_error, None)
        for strength in _STRENGTHS:
            factors = self._factors(strength)
            error = self._error(rows, expected, factors)
            if error is not None and error < (best.error if best.strength else _WORTH * plain_error):
                best = Factors(strength, error, plain_error, factors)
        return best

    def _factors(self, strength: float) -> torch.Tensor:
        """Return factors, at least 1, so that no activation overflows by division."""
        of_weight = torch.linalg.vector_norm(self.matrix, torch.inf, dim=0).float().cpu()
        of_weight = of_weight.clamp(min=max(of_weight.max().item() * _SMALLEST, torch.finfo(torch.float32).tiny))
        amax = self.activations.amax.cpu()
        seen = amax[amax > 0]
        # A channel that was always zero here may not be so later.
        typical = seen.median().item() if len(seen) else 1.0
        amax = torch.where(amax > 0, amax, typical)
        logs = strength * amax.log() - (1 - strength) * of_weight.log()
        factors: torch.Tensor = (logs - logs.min()).exp()
        return factors

    def _error(self, rows: torch.Tensor, expected: torch.Tensor, factors: torch.Tensor | None) -> float | None:
        """Return the relative error, the root of its mean square over rows; None if the weight cannot be prepacked."""
        prepacked = self._kernel.prepack(self._weight, *(() if factors is None else (factors,)))
        if not prepacked:
            return None
        result = self._kernel.run(tuple(prepacked), *product_arguments(self._op, rows, self._weight))
        squares = (result.float() - expected).square().sum(1) / expected.square().sum(1).clamp(min=1e-30)
        return squares.mean().sqrt().item()
