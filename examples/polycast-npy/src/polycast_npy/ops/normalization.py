"""Normalization: of layers, groups and batches. What is normalized together is a row, computed in float32."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .adapter import widen


def _normalize(rows: Any, eps: float) -> tuple[Any, Any, Any]:
    """Return rows with mean 0 and variance 1, their means before, and 1 / deviation."""
    means = rows.mean(axis=1, keepdims=True)
    scales = 1 / np.sqrt(rows.var(axis=1, keepdims=True) + rows.dtype.type(eps))
    return (rows - means) * scales, means, scales


def _normalize_backward(grad: Any, normal: Any, scales: Any) -> Any:
    """Return the gradient of rows, from the one of what they were made into."""
    along = (grad * normal).mean(axis=1, keepdims=True)
    return scales * (grad - grad.mean(axis=1, keepdims=True) - normal * along)


def _affine(normal: Any, weight: Any, bias: Any, shape: Sequence[int]) -> Any:
    if weight is not None:
        normal = normal * weight.reshape(shape)
    return normal if bias is None else normal + bias.reshape(shape)


def _of_channels(ndim: int) -> list[int]:
    """Return the shape with which an array of a value for each channel meets the input."""
    return [1, -1] + [1] * (ndim - 2)


def _wanted(grads: Sequence[Any], output_mask: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(grad if wanted else None for grad, wanted in zip(grads, output_mask, strict=True))


def _to_affine(grad: Any, normal: Any, axes: tuple[int, ...], weight: Any, dtype: Any) -> tuple[Any, Any]:
    """Return the gradients of a weight and a bias."""
    shape, dtype = (-1, dtype) if weight is None else (weight.shape, weight.dtype)
    return tuple(values.sum(axis=axes).reshape(shape).astype(dtype) for values in (grad * normal, grad))


def layer_norm(input: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    """Return the input normalized over its last dimensions, the means, and 1 / deviation."""
    normal, means, scales = _normalize(widen(input).reshape(-1, math.prod(normalized_shape)), eps)
    result = _affine(normal.reshape(input.shape), weight, bias, normalized_shape)
    outer = input.shape[: input.ndim - len(normalized_shape)] + (1,) * len(normalized_shape)
    return result.astype(input.dtype), means.reshape(outer), scales.reshape(outer)


def layer_norm_backward(
    grad_out: Any,
    input: Any,
    normalized_shape: Sequence[int],
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    output_mask: Sequence[bool],
) -> Any:
    """Return the gradients of the input, the weight and the bias, of those that are asked for."""
    length = math.prod(normalized_shape)
    grad, scales = widen(grad_out).reshape(-1, length), rstd.reshape(-1, 1)
    normal = (widen(input).reshape(-1, length) - mean.reshape(-1, 1)) * scales
    rows = _normalize_backward(_affine(grad, weight, None, (1, -1)), normal, scales)
    to_input = rows.reshape(input.shape).astype(input.dtype)
    return _wanted((to_input, *_to_affine(grad, normal, (0,), weight, input.dtype)), output_mask)


def group_norm(input: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float) -> Any:
    """Return the input normalized over groups of channels, the means, and 1 / deviation."""
    normal, means, scales = _normalize(widen(input).reshape(N * group, -1), eps)
    result = _affine(normal.reshape(input.shape), weight, bias, _of_channels(input.ndim))
    return result.astype(input.dtype), means.reshape(N, group), scales.reshape(N, group)


def group_norm_backward(
    grad_out: Any,
    input: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> Any:
    """Return the gradients of the input, the weight and the bias, of those that are asked for."""
    scales = rstd.reshape(-1, 1)
    normal = (widen(input).reshape(N * group, -1) - mean.reshape(-1, 1)) * scales
    grad = widen(grad_out).reshape(N, C, HxW)
    rows = _normalize_backward(_affine(grad, weight, None, (1, -1, 1)).reshape(N * group, -1), normal, scales)
    to_input = rows.reshape(input.shape).astype(input.dtype)
    return _wanted((to_input, *_to_affine(grad, normal.reshape(grad.shape), (0, 2), weight, input.dtype)), output_mask)


def _channels(values: Any) -> Any:
    """Return a row for each channel."""
    return widen(values).swapaxes(0, 1).reshape(values.shape[1], -1)


def _from_channels(rows: Any, like: Any) -> Any:
    shape = (like.shape[1], like.shape[0], *like.shape[2:])
    return rows.reshape(shape).swapaxes(0, 1).astype(like.dtype)


def batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Return the input with each channel normalized, the means, and 1 / deviation; move the running ones in place."""
    rows = _channels(input)
    if training:
        normal, means, scales = _normalize(rows, eps)
        if running_mean is not None:
            running_mean += momentum * (means[:, 0] - running_mean)
            running_var += momentum * (rows.var(axis=1, ddof=1) - running_var)
    else:
        means, scales = running_mean[:, None], 1 / np.sqrt(running_var[:, None] + np.float32(eps))
        normal = (rows - means) * scales
    saved = (means[:, 0], scales[:, 0]) if training else (means[:0, 0], scales[:0, 0])
    return _from_channels(_affine(normal, weight, bias, (-1, 1)), input), *saved


def batch_norm_backward(
    grad_out: Any,
    input: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    """Return the gradients of the input, the weight and the bias, of those that are asked for."""
    means, scales = (save_mean, save_invstd) if train else (running_mean, 1 / np.sqrt(running_var + np.float32(eps)))
    scales = scales[:, None]
    grad, normal = _channels(grad_out), (_channels(input) - means[:, None]) * scales
    weighted = _affine(grad, weight, None, (-1, 1))
    rows = _normalize_backward(weighted, normal, scales) if train else weighted * scales
    affine = _to_affine(grad, normal, (1,), weight, input.dtype)
    return _wanted((_from_channels(rows, input), *affine), output_mask)


KERNELS: dict[str, Callable[..., Any]] = {
    "native_layer_norm": layer_norm,
    "native_layer_norm_backward": layer_norm_backward,
    "native_group_norm": group_norm,
    "native_group_norm_backward": group_norm_backward,
    "native_batch_norm": batch_norm,
    "native_batch_norm_backward": batch_norm_backward,
}
