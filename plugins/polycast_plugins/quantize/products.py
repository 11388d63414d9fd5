"""`Products`: the products of a model's weights with activations, and the factors that lower their errors most."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from polycast.plugin import LowBitKernel, Plan

from .equalization import EqualizedWeight, fingerprint_of
from .weight_matrices import (
    TRANSPOSED,
    WHOLE,
    activations_of,
    first_of,
    matrix_of,
    parameters_by_name,
    product_arguments,
    view_of,
)

_SEED = 0
_STRENGTHS = (0.35, 0.5, 0.65, 0.8)
_WORTH = 0.95
"""Factors cost time at each call, so they must lower the error to this fraction."""
_SMALLEST = 2.0**-20
"""The smallest magnitudes of a weight's channels that count, relative to the largest: others hardly matter."""
_ROWS = 64
"""The rows in a sample. These are few compared with the output features of most weights, so they take little memory."""


class Products:
    """The products by weights of a model.

    Attributes:
        found: the products by each weight, by its name.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.found: dict[str, tuple[str, str, torch.Tensor, EqualizedProduct]] = {}
        self._names: dict[int, str] = {}
        self._by_values: dict[str, EqualizedProduct] = {}
        for name, parameter in parameters_by_name(model).items():
            self._names.setdefault(id(parameter), name)
        self._generator = torch.Generator().manual_seed(_SEED)

    def add(self, kernel: LowBitKernel, op: str, args: Sequence[Any]) -> None:
        """Add a call of an op, given its kernel."""
        weight = args[kernel.weight]
        parameter, matrix = Plan.weight_of(weight), matrix_of(op, weight)
        if not kernel.equalizes or matrix is None or parameter is None or id(parameter) not in self._names:
            return
        name, view = self._names[id(parameter)], view_of(matrix, parameter)
        if view is None:
            return
        key = name if view in (WHOLE, TRANSPOSED) else f"{name}[{view}]"
        if key in self.found and self.found[key][1] != view:  # the matrix and the transposed one
            key = f"{name}[{view or 'whole'}]"
        if key not in self.found:
            values = fingerprint_of(matrix)  # kernels find factors by it, so equal weights have the same
            product = self._by_values.get(values) or EqualizedProduct(
                kernel, op, weight.detach(), matrix.detach(), self._generator
            )
            self._by_values[values] = product
            self.found[key] = name, view, parameter, product
        self.found[key][3].activations.add(activations_of(op, args))

    def equalized(self) -> Iterator[EqualizedWeight]:
        """Yield the weights with the factors that were chosen.

        Raises:
            ValueError: all activations of a weight have inf or nan.
        """
        broken = [key for key, (*_, product) in self.found.items() if product.activations.are_all_left_out]
        if broken:
            raise ValueError(
                f"{first_of(map(repr, broken))} got inf or nan in each row of the activations: check the batches. "
                "polycast.observe() names the op that makes the first of them."
            )
        for key, (name, view, parameter, product) in self.found.items():
            chosen = product.choose() if len(product.activations.rows) else None
            if chosen is not None:
                yield EqualizedWeight(
                    name=key,
                    shape=(product.matrix.shape[0], product.matrix.shape[1]),
                    strength=chosen.strength,
                    error=chosen.error,
                    plain_error=chosen.plain_error,
                    parameter=name,
                    size=tuple(parameter.shape),
                    view=view,
                    fingerprint=fingerprint_of(product.matrix),
                    factors=chosen.factors,
                )


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
        self, kernel: LowBitKernel, op: str, weight: torch.Tensor, matrix: torch.Tensor, generator: torch.Generator
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


class Activations:
    """The activations of one weight, in memory that does not grow with their number.

    Attributes:
        amax: float32 [K], the largest magnitude of each input channel.
        rows: [up to 64, K], a sample in which each row is equally likely.
        left_out: whether rows were left out, because of inf or nan.
    """

    def __init__(self, terms: int, device: torch.device, generator: torch.Generator) -> None:
        self.amax = torch.zeros(terms, device=device)
        self.rows = torch.empty(0, terms, device=device)
        self.left_out = False
        self._keys = torch.empty(0)
        self._generator = generator

    @property
    def are_all_left_out(self) -> bool:
        """Whether there were rows, all with inf or nan."""
        return self.left_out and not len(self.rows)

    def add(self, x: torch.Tensor) -> None:
        """Add activations [..., K]. Rows with inf or nan are left out."""
        rows = x.detach().reshape(-1, x.shape[-1])
        if not len(rows):
            return
        amax = _amax(rows)
        if not bool(amax.isfinite().all()):
            self.left_out = True
            rows = rows[rows.isfinite().all(1)]
            if not len(rows):
                return
            amax = _amax(rows)
        torch.maximum(self.amax, amax, out=self.amax)
        keys, places = torch.rand(len(rows), generator=self._generator).topk(min(_ROWS, len(rows)))
        keys = torch.cat((self._keys, keys))
        self._keys, chosen = keys.topk(min(_ROWS, len(keys)))
        sample = rows[places.to(rows.device)].float()
        self.rows = torch.cat((self.rows, sample))[chosen.to(rows.device)]


def _amax(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude in each column, without a copy of the rows."""
    amax: torch.Tensor = torch.linalg.vector_norm(rows, torch.inf, dim=0)
    return amax.float()
