"""Elements by their indices, sequences, and joining tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .adapter import in_range


def _key(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


def take(self: Any, indices: Sequence[Any]) -> Any:
    """Return the elements that index arrays say."""
    return self[_key(indices)]


def put(self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, unsafe: bool = False) -> Any:
    """Return the array with elements that index arrays say replaced, or added to."""
    changed = self.copy()
    if accumulate:
        np.add.at(changed, _key(indices), values)
    else:
        changed[_key(indices)] = values
    return changed


def select(self: Any, dim: int, index: Any) -> Any:
    """Return slices by their indices."""
    return np.take(self, in_range(index, self.shape[dim]), axis=dim) if self.ndim else self.copy()


def add_at(self: Any, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
    """Return the array with slices added at indices."""
    changed = self.copy()
    np.add.at(changed, (slice(None),) * (dim % self.ndim) + (in_range(index, self.shape[dim]),), alpha * source)
    return changed


def gather(self: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    """Return the elements at indices along a dimension."""
    inside = tuple(slice(length) if axis != dim % self.ndim else slice(None) for axis, length in enumerate(index.shape))
    return np.take_along_axis(self[inside], in_range(index, self.shape[dim]), dim)


def _along(values: Any, dim: int, index: Any) -> tuple[Any, ...]:
    """Return the key of the elements at indices along a dimension."""
    at = list(np.indices(index.shape))
    at[dim] = in_range(index, values.shape[dim])
    return tuple(at)


def scatter_add(self: Any, dim: int, index: Any, src: Any) -> Any:
    """Return the array with elements added at indices along a dimension."""
    changed = self.copy()
    np.add.at(changed, _along(changed, dim, index), src[tuple(map(slice, index.shape))])
    return changed


def scatter(self: Any, dim: int, index: Any, src: Any) -> Any:
    """Return the array with elements replaced at indices along a dimension."""
    changed = self.copy()
    changed[_along(changed, dim, index)] = src[tuple(map(slice, index.shape))]
    return changed


def scatter_value(self: Any, dim: int, index: Any, value: Any) -> Any:
    """Return the array with a value at indices along a dimension."""
    changed = self.copy()
    changed[_along(changed, dim, index)] = value
    return changed


def flip(self: Any, dims: Sequence[int]) -> Any:
    """Return the array with dimensions reversed."""
    return np.flip(self, tuple(dims)).copy()


def masked_select(self: Any, mask: Any) -> Any:
    """Return the elements where a mask holds."""
    values, holds = np.broadcast_arrays(self, mask)
    return values[holds]


def embedding_backward(
    grad_output: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    """Return the gradient of the table of an embedding.

    Raises:
        NotImplementedError: the gradient is to be scaled by frequency.
    """
    if scale_grad_by_freq:
        raise NotImplementedError("npy has no embedding with scale_grad_by_freq: leave it False")
    grad = np.zeros((num_weights, grad_output.shape[-1]), np.float32)
    np.add.at(grad, indices.reshape(-1), grad_output.reshape(-1, grad_output.shape[-1]))
    if padding_idx >= 0:
        grad[padding_idx] = 0
    return grad.astype(grad_output.dtype)


def join(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Return arrays joined along a dimension; one-dimensional ones without elements fit any."""
    kept = [values for values in tensors if values.shape != (0,)]
    return np.concatenate(kept, axis=dim) if kept else tensors[0]


def sequence(start: Any, end: Any, step: Any = 1) -> Any:
    """Return the numbers from one to another."""
    return np.arange(start, end, step)


def linear_sequence(start: Any, end: Any, steps: int) -> Any:
    """Return numbers at equal distances."""
    return np.linspace(start, end, steps)


def identity(n: int, m: int) -> Any:
    """Return ones on the diagonal."""
    return np.eye(n, m)


def upper(self: Any, diagonal: int = 0) -> Any:
    """Return the upper triangle."""
    return np.triu(self, diagonal)


def lower(self: Any, diagonal: int = 0) -> Any:
    """Return the lower triangle."""
    return np.tril(self, diagonal)


def nonzero(self: Any) -> Any:
    """Return the indices of what is not zero."""
    return np.argwhere(self)


def same(self: Any, other: Any) -> bool:
    """Return whether two tensors are equal."""
    return bool(np.array_equal(self, other))


KERNELS: dict[str, Callable[..., Any]] = {
    "index.Tensor": take,
    "_index_put_impl_": put,
    "index_select": select,
    "index_add.out": add_at,
    "gather.out": gather,
    "scatter.src_out": scatter,
    "scatter.value_out": scatter_value,
    "scatter_add.out": scatter_add,
    "flip": flip,
    "masked_select": masked_select,
    "embedding_dense_backward": embedding_backward,
    "cat.out": join,
    "arange.start_out": sequence,
    "linspace.out": linear_sequence,
    "eye.m_out": identity,
    "triu.out": upper,
    "tril.out": lower,
    "nonzero": nonzero,
    "equal": same,
}
