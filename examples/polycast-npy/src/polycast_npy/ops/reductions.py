"""Ops that reduce dimensions. Sums of float16 are made in float32, and rounded once."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .adapter import widen


def _axes(dim: Any) -> tuple[int, ...] | None:
    """Return NumPy's axes; none given means all, as in torch."""
    if isinstance(dim, int):
        return (dim,)
    return tuple(dim) if dim else None


def total(self: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Return sums."""
    return np.sum(widen(self), axis=_axes(dim), keepdims=keepdim)


def product(self: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Return products."""
    return np.prod(widen(self), axis=_axes(dim), keepdims=keepdim)


def mean(self: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Return means."""
    return np.mean(widen(self), axis=_axes(dim), keepdims=keepdim)


def variance(self: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """Return variances, in the dtype of the input."""
    return np.var(widen(self), axis=_axes(dim), ddof=correction, keepdims=keepdim).astype(self.dtype)


def deviation(self: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """Return standard deviations, in the dtype of the input."""
    return np.sqrt(variance(widen(self), dim, correction, keepdim)).astype(self.dtype)


def norm(self: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Return norms of vectors."""
    sizes, axes = np.abs(widen(self)), _axes(dim)
    if ord in (np.inf, -np.inf):
        return (np.max if ord > 0 else np.min)(sizes, axis=axes, keepdims=keepdim)
    if ord == 0:
        return np.count_nonzero(sizes, axis=axes, keepdims=keepdim)
    return np.sum(sizes**ord, axis=axes, keepdims=keepdim) ** (1 / ord)


def cumulative(self: Any, dim: int, dtype: Any = None) -> Any:
    """Return cumulative sums."""
    return np.cumsum(widen(self), axis=dim)


def _extreme(function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(self: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        return function(self, axis=_axes(dim), keepdims=keepdim)

    return kernel


def _position(function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(self: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        found = function(self, axis=dim)
        if not keepdim:
            return found
        return found.reshape([1] * self.ndim) if dim is None else np.expand_dims(found, dim)

    return kernel


def _extreme_and_position(function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(self: Any, dim: int, keepdim: bool = False) -> Any:
        at = np.expand_dims(function(self, axis=dim), dim)
        found = np.take_along_axis(self, at, dim)
        return (found, at) if keepdim else (found.squeeze(dim), at.squeeze(dim))

    return kernel


def _over_all(function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(self: Any) -> Any:
        return function(self)

    return kernel


KERNELS: dict[str, Callable[..., Any]] = {
    "sum.IntList_out": total,
    "prod": product,
    "prod.int_out": product,
    "mean.out": mean,
    "var.correction": variance,
    "std.correction": deviation,
    "linalg_vector_norm.out": norm,
    "cumsum.out": cumulative,
    "amax.out": _extreme(np.max),
    "amin.out": _extreme(np.min),
    "any.out": _extreme(np.any),
    "all.out": _extreme(np.all),
    "any.all_out": _over_all(np.any),
    "all.all_out": _over_all(np.all),
    "max": _over_all(np.max),
    "min": _over_all(np.min),
    "argmax.out": _position(np.argmax),
    "argmin.out": _position(np.argmin),
    "max.dim_max": _extreme_and_position(np.argmax),
    "min.dim_min": _extreme_and_position(np.argmin),
}
