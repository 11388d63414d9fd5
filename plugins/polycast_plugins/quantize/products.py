"""`Products`: the products of a model's weights with activations, and what lowers their errors most."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from polycast.plugin import LowBitKernel, Plan

from .calibration import CalibratedWeight, fingerprint_of
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

_log = logging.getLogger("polycast.calibrate")
_SEED = 0
_STRENGTHS = (0.35, 0.5, 0.65, 0.8)
_WORTH = 0.95
"""Factors cost time at each call, so they must lower the error to this fraction."""
_SMALLEST = 2.0**-20
"""The smallest magnitudes of a weight's channels that count, relative to the largest: others hardly matter."""
_MOMENTS_BYTES = 2**31
"""The memory for the moments of the activations of some weights, which one more pass over the data collects."""
_ROWS = 64
"""The rows in a sample. These are few compared with the output features of most weights, so they take little memory."""


class Products:
    """The products by weights of a model.

    Attributes:
        found: the products by each weight, by its name.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.found: dict[str, tuple[str, str, torch.Tensor, WeightProducts]] = {}
        self._names: dict[int, str] = {}
        self._by_values: dict[str, WeightProducts] = {}
        self._last: tuple[torch.Tensor, int] | None = None
        self._given: list[Moments] = []
        """The moments that were given the last activations."""
        self._collects_moments = False
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
            values = fingerprint_of(matrix)  # kernels find a calibration by it, so equal weights have the same
            product = self._by_values.get(values) or WeightProducts(
                kernel, op, weight.detach(), matrix.detach(), values, self._generator
            )
            self._by_values[values] = product
            self.found[key] = name, view, parameter, product
        self._add(self.found[key][3], activations_of(op, args))

    def _add(self, product: "WeightProducts", x: torch.Tensor) -> None:
        version = 0 if x.is_inference() else x._version
        if self._last is None or self._last[0] is not x or self._last[1] != version:
            self._last, self._given = (x, version), []
        if product.moments is None:  # those of queries, keys and values are the same
            product.moments = self._given[0] if self._given else Moments(x.shape[-1])
        if not self._collects_moments:
            product.activations.add(x)
        elif product.moments not in self._given:
            product.moments.add(x)
        self._given.append(product.moments)

    def calibrated(
        self, run: Callable[[], object], known: Mapping[str, CalibratedWeight]
    ) -> Iterator[Sequence[CalibratedWeight]]:
        """Yield weights with the factors and levels that were chosen, some at a time.

        Args:
            run: runs the model over the data once more, and calls `add` for each product.
            known: weights that were calibrated before, by fingerprint. Those of another format are calibrated again.

        Raises:
            ValueError: all activations of a weight have inf or nan.
        """
        broken = [key for key, (*_, product) in self.found.items() if product.activations.are_all_left_out]
        if broken:
            raise ValueError(
                f"{first_of(map(repr, broken))} got inf or nan in each row of the activations: check the batches. "
                "polycast.observe() names the op that makes the first of them."
            )
        known = {
            fingerprint: weight
            for fingerprint, weight in known.items()
            if fingerprint in self._by_values and weight.format == self._by_values[fingerprint].format
        }
        missing = [
            product
            for product in self._by_values.values()
            if product.fingerprint not in known and len(product.activations.rows)
        ]
        for product in missing:
            product.choose_factors()
        yield self._weights(known, lambda product: not product.takes_levels)
        rest = [product for product in missing if product.takes_levels]
        self._collects_moments, done = True, len(missing) - len(rest)
        while rest:
            part, moments = _fitting(rest)
            for each in moments:
                each.collect(part[0].matrix.device)
            run()
            self._last = None
            for product in part:
                product.choose_levels()
                done += 1
                _log.info("calibrated %d of %d weights", done, len(missing))
            for each in moments:
                each.total = None
            del rest[: len(part)]
            yield self._weights({}, part.__contains__)

    def _weights(
        self, known: Mapping[str, CalibratedWeight], is_wanted: Callable[["WeightProducts"], bool]
    ) -> list[CalibratedWeight]:
        weights = []
        for key, (name, view, parameter, product) in self.found.items():
            places: dict[str, Any] = {"name": key, "parameter": name, "size": tuple(parameter.shape), "view": view}
            if product.fingerprint in known:
                weights.append(replace(known[product.fingerprint], **places))
            elif product.is_prepacked and is_wanted(product):
                weights.append(product.calibrated(**places))
        return weights


def _fitting(products: Sequence["WeightProducts"]) -> tuple[list["WeightProducts"], list["Moments"]]:
    """Return the first products whose moments fit the memory for them, at least one, and the moments."""
    part: list[WeightProducts] = []
    moments: list[Moments] = []
    for product in products:
        assert product.moments is not None  # it was multiplied
        if product.moments not in moments:
            if moments and sum(each.bytes for each in (*moments, product.moments)) > _MOMENTS_BYTES:
                break
            moments.append(product.moments)
        part.append(product)
    return part, moments


class WeightProducts:
    """The products by one weight, and what is chosen for it.

    Attributes:
        matrix: the weight, [N, K].
        fingerprint: that of the matrix.
        activations: what it was multiplied by.
        moments: those of the activations, shared with other weights that have the same; None before the first call.
        is_prepacked: whether the kernel could prepack the weight.
    """

    def __init__(
        self,
        kernel: LowBitKernel,
        op: str,
        weight: torch.Tensor,
        matrix: torch.Tensor,
        fingerprint: str,
        generator: torch.Generator,
    ) -> None:
        self._kernel, self._op, self._weight = kernel, op, weight
        self.matrix, self.fingerprint = matrix, fingerprint
        self.activations = Activations(matrix.shape[1], matrix.device, generator)
        self.moments: Moments | None = None
        self.is_prepacked = False
        self._strength, self._error, self._plain_error = 0.0, 0.0, 0.0
        self._factors: torch.Tensor | None = None
        self._levels: tuple[torch.Tensor, ...] = ()

    @property
    def format(self) -> str:
        """The format of the levels that the kernel takes."""
        return self._kernel.levels

    @property
    def takes_levels(self) -> bool:
        """Whether the kernel takes levels, and can prepack the weight."""
        return bool(self.format) and self.is_prepacked

    def calibrated(self, **places: Any) -> CalibratedWeight:
        """Return the weight with what was chosen for it, given where it is in the model."""
        return CalibratedWeight(
            shape=(self.matrix.shape[0], self.matrix.shape[1]),
            strength=self._strength,
            format=self.format,
            error=self._error,
            plain_error=self._plain_error,
            fingerprint=self.fingerprint,
            factors=self._factors,
            levels=self._levels,
            **places,
        )

    def choose_factors(self) -> None:
        """Choose the factors with which the error is the least; none if the kernel cannot prepack the weight.

        There must be rows of activations.
        """
        plain_error = self._error_with()
        if plain_error is None:
            return
        self.is_prepacked = True
        self._plain_error = self._error = plain_error
        for strength in _STRENGTHS:
            factors = self._factors_of(strength)
            error = self._error_with(factors)
            if error is not None and error < (self._error if self._strength else _WORTH * plain_error):
                self._strength, self._factors, self._error = strength, factors, error

    def choose_levels(self) -> None:
        """Choose levels by the moments, if these are finite and lower the error."""
        moments = None if self.moments is None else self.moments.total
        assert moments is not None  # it was multiplied in this pass too
        if not bool(moments.isfinite().all()):  # squares of large activations overflow
            return
        matrix, kernel = self.matrix.float(), cast("Any", self._kernel)
        if self._factors is not None:
            factors = self._factors.to(matrix.device)
            matrix, moments = matrix * factors, moments / factors / factors[:, None]
        levels = kernel.compensate(matrix, moments)
        error = self._error_with(self._factors, levels)
        if error is not None and error < self._error:
            self._levels, self._error = levels, error

    def _factors_of(self, strength: float) -> torch.Tensor:
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

    def _error_with(self, *of_calibration: Any) -> float | None:
        """Return the relative error, the root of its mean square over rows; None if the weight cannot be prepacked."""
        prepacked = self._kernel.prepack(self._weight, *of_calibration)
        if not prepacked:
            return None
        rows = self.activations.rows
        expected = rows @ self.matrix.float().t()
        result = self._kernel.run(tuple(prepacked), *product_arguments(self._op, rows, self._weight))
        squares = (result.float() - expected).square().sum(1) / expected.square().sum(1).clamp(min=1e-30)
        return squares.mean().sqrt().item()


class Moments:
    """The second moments of activations [..., K].

    Attributes:
        total: the sum of ``x.T @ x``, float32 [K, K]; None while they are not collected.
        bytes: its memory.
    """

    def __init__(self, terms: int) -> None:
        self.total: torch.Tensor | None = None
        self.bytes = 4 * terms**2
        self._terms = terms

    def collect(self, device: torch.device) -> None:
        """Begin to collect."""
        self.total = torch.zeros(self._terms, self._terms, device=device)

    def add(self, x: torch.Tensor) -> None:
        """Add activations, if they are collected. Rows with inf or nan are left out."""
        if self.total is not None:
            rows = x.detach().reshape(-1, x.shape[-1]).float()
            rows = rows[rows.isfinite().all(1)]
            self.total.addmm_(rows.t(), rows)


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
