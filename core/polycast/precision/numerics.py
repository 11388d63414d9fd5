"""Measure the numerical error of tensors against a reference."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from ..policy.plain_data import plain_fields
from .values import tensors_in

_CHUNK = 1 << 20
"""The number of elements compared at once, in float64 on the host, because not every device supports float64."""


@dataclass(frozen=True)
class Error:
    """The error of tensors against a reference.

    Attributes:
        max: the largest absolute error.
        relative: the L2 norm of the error, relative to the L2 norm of the reference.
        cosine: the cosine similarity; nan if the error of an element is infinite.
        inf, nan: the numbers of inf and nan elements.
        made: the number of inf or nan elements that are finite in the reference. Their error is infinite; the same inf
            or nan in both is no error.
    """

    max: float
    relative: float
    cosine: float
    inf: int
    nan: int
    made: int

    def to_dict(self) -> dict[str, Any]:
        """Return the error as plain data."""
        return plain_fields(self)


class Sums:
    """The sums from which the error of several tensors is computed.

    Attributes:
        elements, inf, nan: the numbers of elements, and of inf and nan elements.
        made: the number of inf or nan elements that are finite in the reference.
    """

    def __init__(self) -> None:
        self._max = self._error = self._reference = self._other = self._product = 0.0
        self.elements = self.inf = self.nan = self.made = 0

    @classmethod
    def of(cls, reference: object, other: object) -> "Sums":
        """Return the sums of the tensors in a value.

        The error of a tensor without a counterpart, or with one of another shape, is infinite.
        """
        sums = cls()
        for expected, got in zip_longest(_compared(reference), _compared(other)):
            if expected is None or got is None or expected.shape != got.shape:
                sums._max = sums._error = math.inf
                continue
            for one, two in zip(_chunks(expected), _chunks(got), strict=True):
                sums._add(one, two)
        return sums

    def add(self, other: "Sums") -> None:
        """Add the sums of other tensors."""
        highest = max(self._max, other._max)
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        self._max = highest

    def _add(self, reference: torch.Tensor, other: torch.Tensor) -> None:
        finite = reference.isfinite()
        same = (reference == other) | (reference.isnan() & other.isnan())
        error = torch.where(same, 0.0, (other - reference).abs()).nan_to_num(math.inf, math.inf)
        self._max = max(self._max, error.max().item())
        self._error += error.square().sum().item()
        reference, sound = torch.where(finite, reference, 0.0), torch.where(other.isfinite(), other, 0.0)
        self._reference += reference.square().sum().item()
        self._other += sound.square().sum().item()
        self._product += torch.dot(reference, sound).item()
        self.elements += other.numel()
        self.inf += int(other.isinf().sum())
        self.nan += int(other.isnan().sum())
        self.made += int((finite & ~other.isfinite()).sum())

    @property
    def norm(self) -> float:
        """The L2 norm of the reference."""
        return math.sqrt(self._reference)

    @property
    def norm_of_error(self) -> float:
        """The L2 norm of the error."""
        return math.sqrt(self._error)

    @property
    def relative(self) -> float:
        """The relative L2 error."""
        return self.relative_to(self)

    def relative_to(self, other: "Sums") -> float:
        """Return the L2 norm of this error relative to the reference of other sums."""
        if self._error == 0:
            return 0.0
        return math.sqrt(self._error / other._reference) if other._reference else math.inf

    def error(self) -> Error:
        """Return the error."""
        norms = math.sqrt(self._reference) * math.sqrt(self._other)
        if math.isinf(self._error):
            cosine = math.nan
        elif norms == 0:
            cosine = 1.0 if self._reference == self._other else 0.0
        else:
            cosine = max(-1.0, min(1.0, self._product / norms))
        return Error(self._max, self.relative, cosine, self.inf, self.nan, self.made)

    @property
    def has_no_finite(self) -> bool:
        """Whether there are elements, and none is finite."""
        return self.inf + self.nan == self.elements > 0

    def nonfinite_warning(self, consequence: str, reference: str = "float32") -> str:
        """Return a warning about the inf and nan elements in the output of a reference."""
        counts = " and ".join(f"{count} {what}" for count, what in ((self.inf, "inf"), (self.nan, "nan")) if count)
        none = ", and no finite one" if self.has_no_finite else ""
        return (
            f"{reference}'s own output has {counts} among its {self.elements} elements{none}: {consequence}. "
            "polycast.observe() names the op that makes the first of them."
        )


def relative_error(output: object, reference: object) -> float:
    """Return the relative L2 error over all floating-point tensors in an output: the default metric.

    The error of an element that is inf or nan in only one of the two is infinite.
    """
    return Sums.of(reference, output).relative


def has_floats(value: object) -> bool:
    """Return whether a value contains floating-point or complex tensors."""
    return next(_compared(value), None) is not None


def is_finite(value: object) -> bool:
    """Return whether all elements of the tensors in a value are finite."""
    sums = Sums.of(value, value)
    return not (sums.inf or sums.nan)


def _compared(value: object) -> Iterator[torch.Tensor]:
    for _, tensor in tensors_in(value):
        if tensor.layout is torch.strided:
            if tensor.is_complex():
                yield torch.view_as_real(tensor.detach().resolve_conj())
            elif tensor.is_floating_point():
                yield tensor.detach()


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.reshape(-1)
    for chunk in torch.split(flat, _CHUNK) if flat.numel() else ():
        yield chunk.cpu().double()
