"""Max pooling over the last two dimensions."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


def _pair(value: Sequence[int]) -> tuple[int, int]:
    return (value[0], value[-1])


def _places(length: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Return how many windows there are; with `ceil_mode` one may begin in the input and end outside of it."""
    free = length + 2 * padding - dilation * (kernel - 1) - 1
    count = (free + (stride - 1 if ceil_mode else 0)) // stride + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= length + padding else count


def max_pool(
    self: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """Return the greatest element of each window, and its index in the plane."""
    kernel, steps, spread = _pair(kernel_size), _pair(stride or kernel_size), _pair(dilation)
    before = _pair(padding)
    plane = self.shape[-2:]
    counts = [_places(*each, ceil_mode) for each in zip(plane, kernel, steps, before, spread, strict=True)]
    extent = [step * (length - 1) + 1 for length, step in zip(kernel, spread, strict=True)]
    after = [
        max(0, (count - 1) * step + width - length - pad)
        for count, step, width, length, pad in zip(counts, steps, extent, plane, before, strict=True)
    ]
    lowest = -np.inf if self.dtype.kind == "f" else np.iinfo(self.dtype).min
    around = [(0, 0)] * (self.ndim - 2) + list(zip(before, after, strict=True))
    windows = sliding_window_view(np.pad(self, around, constant_values=lowest), extent, axis=(-2, -1))
    windows = windows[..., :: steps[0], :: steps[1], :: spread[0], :: spread[1]][..., : counts[0], : counts[1], :, :]
    flat = windows.reshape(*windows.shape[:-2], -1)
    best = flat.argmax(axis=-1)
    row = np.arange(counts[0])[:, None] * steps[0] - before[0] + best // kernel[1] * spread[0]
    column = np.arange(counts[1]) * steps[1] - before[1] + best % kernel[1] * spread[1]
    return np.take_along_axis(flat, best[..., None], -1)[..., 0], row * plane[1] + column


def max_pool_backward(
    grad_output: Any,
    self: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Any,
) -> Any:
    """Return the gradient of the input: each window gives its own to the element that was greatest."""
    planes = int(np.prod(self.shape[:-2], dtype=int))
    grad = np.zeros((planes, self.shape[-2] * self.shape[-1]), np.float32)
    np.add.at(grad, (np.arange(planes)[:, None], indices.reshape(planes, -1)), grad_output.reshape(planes, -1))
    return grad.reshape(self.shape)


KERNELS: dict[str, Callable[..., Any]] = {
    "max_pool2d_with_indices.out": max_pool,
    "max_pool2d_with_indices_backward.grad_input": max_pool_backward,
}
