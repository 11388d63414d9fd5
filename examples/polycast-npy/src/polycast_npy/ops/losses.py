"""Softmax and losses."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .adapter import in_range, widen

_NONE, _MEAN, _SUM = 0, 1, 2  # at::Reduction
_REDUCTIONS: dict[int, Callable[..., Any]] = {_NONE: np.asarray, _MEAN: np.mean, _SUM: np.sum}


def softmax(self: Any, dim: int, half_to_float: bool) -> Any:
    """Return exponentials that add up to one."""
    powers = np.exp(widen(self) - np.max(self, axis=dim, keepdims=True))
    return powers / powers.sum(axis=dim, keepdims=True)


def softmax_backward(grad_output: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    """Return the gradient of softmax."""
    weighted = widen(grad_output) * output
    return weighted - output * weighted.sum(axis=dim, keepdims=True)


def log_softmax(self: Any, dim: int, half_to_float: bool) -> Any:
    """Return the logarithm of softmax."""
    shifted = widen(self) - np.max(self, axis=dim, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=dim, keepdims=True))


def log_softmax_backward(grad_output: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    """Return the gradient of the logarithm of softmax."""
    grad = widen(grad_output)
    return grad - np.exp(widen(output)) * grad.sum(axis=dim, keepdims=True)


def _weights(rows: Any, target: Any, weight: Any, ignore_index: int, dtype: Any) -> tuple[Any, Any]:
    """Return the class that each row counts for, and with what weight."""
    counted = target != ignore_index
    classes = in_range(np.where(counted, target, 0), rows.shape[1])
    return classes, counted.astype(dtype) * (1 if weight is None else weight[classes])


def nll_loss(self: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    """Return minus the log-probabilities of the targets, reduced, and the sum of their weights."""
    rows, targets = np.atleast_2d(widen(self)), target.reshape(-1)
    classes, weights = _weights(rows, targets, weight, ignore_index, rows.dtype)
    losses = -np.take_along_axis(rows, classes[:, None], 1)[:, 0] * weights
    if reduction == _MEAN:
        return losses.sum() / weights.sum(), weights.sum()
    if reduction == _SUM:
        return losses.sum(), weights.sum()
    return losses.reshape(target.shape), 0


def nll_loss_backward(
    grad_output: Any, self: Any, target: Any, weight: Any, reduction: int, ignore_index: int, total_weight: Any
) -> Any:
    """Return the gradient of the log-probabilities."""
    rows, targets = np.atleast_2d(self), target.reshape(-1)
    classes, weights = _weights(rows, targets, weight, ignore_index, np.float32)
    scale = grad_output.reshape(-1) / (total_weight if reduction == _MEAN else 1)
    grad = np.zeros(rows.shape, np.float32)
    np.put_along_axis(grad, classes[:, None], (-weights * scale)[:, None], 1)
    return grad.reshape(self.shape)


def mse_loss(self: Any, target: Any, reduction: int = _MEAN) -> Any:
    """Return the squares of the differences, reduced."""
    squares = np.square(widen(self) - target)
    return _REDUCTIONS[reduction](squares)


def mse_loss_backward(grad_output: Any, self: Any, target: Any, reduction: int) -> Any:
    """Return the gradient of the squares of the differences."""
    scale = 2 / self.size if reduction == _MEAN else 2
    return (scale * (widen(self) - target) * grad_output).astype(self.dtype)


KERNELS: dict[str, Callable[..., Any]] = {
    "_softmax.out": softmax,
    "_softmax_backward_data.out": softmax_backward,
    "_log_softmax.out": log_softmax,
    "_log_softmax_backward_data.out": log_softmax_backward,
    "nll_loss_forward.output": nll_loss,
    "nll_loss_backward.grad_input": nll_loss_backward,
    "mse_loss.out": mse_loss,
    "mse_loss_backward": mse_loss_backward,
}
