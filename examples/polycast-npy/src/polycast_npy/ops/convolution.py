"""Convolution over any number of dimensions, as a matrix product: a column of one matrix is a window of the input."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .adapter import widen


def _pad(values: Any, padding: Sequence[int]) -> Any:
    return np.pad(values, [(0, 0), (0, 0), *((width, width) for width in padding)])


def _each_plane(places: Iterable[Any]) -> tuple[Any, ...]:
    """Return the key of places in the plane of each image and channel."""
    return (slice(None), slice(None), *places)


def _columns(padded: Any, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int) -> Any:
    """Return the windows of an input, of shape (groups, channels * kernel, images * places), and how many places."""
    images, channels = padded.shape[:2]
    n = len(kernel)
    extent = [step * (length - 1) + 1 for length, step in zip(kernel, dilation, strict=True)]
    windows = sliding_window_view(padded, extent, axis=tuple(range(2, 2 + n)))
    windows = windows[_each_plane(slice(None, None, step) for step in (*stride, *dilation))]
    places = windows.shape[2 : 2 + n]
    # images, channels, places, kernel -> channels, kernel, images, places
    order = (1, *range(2 + n, 2 + 2 * n), 0, *range(2, 2 + n))
    columns = windows.transpose(order).reshape(groups, channels // groups * math.prod(kernel), -1)
    return columns, (images, *places)


def _from_columns(
    columns: Any,
    padded_shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    places: Sequence[int],
) -> Any:
    """Return the sums, for each element of a padded input, of the entries of columns that come from it."""
    images, channels, *_ = padded_shape
    columns = columns.reshape(channels, *kernel, images, *places)
    total = np.zeros((channels, images, *padded_shape[2:]), columns.dtype)
    for position in itertools.product(*map(range, kernel)):
        window = tuple(
            slice(at * spread, at * spread + (count - 1) * step + 1, step)
            for at, spread, count, step in zip(position, dilation, places, stride, strict=True)
        )
        of_position = (slice(None), *position)
        total[_each_plane(window)] += columns[of_position]
    return total.swapaxes(0, 1)


def _refuse_transposed(transposed: bool) -> None:
    if transposed:
        raise NotImplementedError("npy has no transposed convolution: compute it on the CPU")


def convolve(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """Return a convolution.

    Raises:
        NotImplementedError: it is a transposed one.
    """
    _refuse_transposed(transposed)
    kernel = weight.shape[2:]
    columns, (images, *places) = _columns(_pad(widen(input), padding), kernel, stride, dilation, groups)
    product = widen(weight).reshape(groups, -1, columns.shape[1]) @ columns
    result = product.reshape(-1, images, *places).swapaxes(0, 1)
    if bias is not None:
        result = result + bias.reshape(-1, *[1] * len(kernel))
    return result.astype(input.dtype)


def convolve_backward(
    grad_output: Any,
    input: Any,
    weight: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """Return the gradients of the input, the weight and the bias, of those that are asked for.

    Raises:
        NotImplementedError: the convolution is a transposed one.
    """
    _refuse_transposed(transposed)
    kernel = weight.shape[2:]
    padded = _pad(widen(input), padding)
    columns, (_, *places) = _columns(padded, kernel, stride, dilation, groups)
    grad = widen(grad_output).swapaxes(0, 1).reshape(groups, weight.shape[0] // groups, -1)
    to_input = to_weight = to_bias = None
    if output_mask[0]:
        to_columns = widen(weight).reshape(groups, -1, columns.shape[1]).swapaxes(1, 2) @ grad
        total = _from_columns(to_columns, padded.shape, kernel, stride, dilation, places)
        inside = tuple(slice(width, width + length) for width, length in zip(padding, input.shape[2:], strict=True))
        to_input = total[_each_plane(inside)].astype(input.dtype)
    if output_mask[1]:
        to_weight = (grad @ columns.swapaxes(1, 2)).reshape(weight.shape).astype(weight.dtype)
    if output_mask[2]:
        to_bias = grad.sum(axis=-1).reshape(-1).astype(weight.dtype)
    return to_input, to_weight, to_bias


KERNELS: dict[str, Callable[..., Any]] = {
    # The names under which torch leaves convolution to devices that it does not know.
    "convolution_overrideable": convolve,
    "convolution_backward_overrideable": convolve_backward,
}
