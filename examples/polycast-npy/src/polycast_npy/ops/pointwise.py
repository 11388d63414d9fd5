"""Pointwise ops, most of which are NumPy ufuncs."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .adapter import widen

_UNARY = {
    "abs": np.abs,
    "acos": np.arccos,
    "asin": np.arcsin,
    "ceil": np.ceil,
    "cos": np.cos,
    "cosh": np.cosh,
    "exp": np.exp,
    "expm1": np.expm1,
    "floor": np.floor,
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "logical_not": np.logical_not,
    "bitwise_not": np.invert,
    "neg": np.negative,
    "round": np.rint,
    "sgn": np.sign,
    "sign": np.sign,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
}
_BINARY = {
    "atan2.out": np.arctan2,
    "bitwise_and.Tensor_out": np.bitwise_and,
    "bitwise_or.Tensor_out": np.bitwise_or,
    "bitwise_xor.Tensor_out": np.bitwise_xor,
    "logical_and.out": np.logical_and,
    "logical_or.out": np.logical_or,
    "maximum.out": np.maximum,
    "minimum.out": np.minimum,
    "mul.out": np.multiply,
    "remainder.Tensor_out": np.remainder,
}
_COMPARISONS = {
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "ne": np.not_equal,
}
_ROUNDING = {None: np.true_divide, "floor": np.floor_divide}


def _unary(ufunc: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(self: Any) -> Any:
        return ufunc(self)

    return kernel


def _binary(ufunc: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(self: Any, other: Any) -> Any:
        return ufunc(self, other)

    return kernel


def add(self: Any, other: Any, alpha: Any = 1) -> Any:
    """Return the sum of one and `alpha` times the other."""
    return np.add(self, other if alpha == 1 else np.multiply(other, alpha))


def subtract(self: Any, other: Any, alpha: Any = 1) -> Any:
    """Return the difference of one and `alpha` times the other."""
    return np.subtract(self, other if alpha == 1 else np.multiply(other, alpha))


def divide(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    """Return the quotient, rounded as said."""
    if rounding_mode == "trunc":
        return np.trunc(np.true_divide(self, other))
    return _ROUNDING[rounding_mode](self, other)


def floor_divide(self: Any, other: Any) -> Any:
    """Return the quotient rounded down, in the dtype of the operands."""
    return np.floor_divide(self, other)


def power(self: Any, exponent: Any) -> Any:
    """Return powers of numbers or tensors."""
    return np.power(self, exponent)


def clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    """Return what lies within bounds, of which one may be missing."""
    if min is not None:
        self = np.maximum(self, min)
    return self if max is None else np.minimum(self, max)


def add_product(self: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
    """Return the sum of one and `value` times the product of two."""
    return self + value * (tensor1 * tensor2)


def add_quotient(self: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
    """Return the sum of one and `value` times the quotient of two."""
    return self + value * (tensor1 / tensor2)


def interpolate(self: Any, end: Any, weight: Any) -> Any:
    """Return what lies between two, at `weight` of the way."""
    return self + weight * (end - self)


def fill(self: Any, value: Any) -> Any:
    """Return a value for every element."""
    return value


def zero(self: Any) -> Any:
    """Return zero for every element."""
    return 0


def where(condition: Any, self: Any, other: Any) -> Any:
    """Return one's element where a condition holds, else the other's."""
    return np.where(condition, self, other)


def masked_fill(self: Any, mask: Any, value: Any) -> Any:
    """Return a value where a mask holds, else what is there."""
    return np.where(mask, np.asarray(value, self.dtype), self)


def relu(self: Any) -> Any:
    """Return what is positive, and NaN."""
    return np.maximum(self, self.dtype.type(0))


def threshold_backward(grad_output: Any, self: Any, threshold: Any) -> Any:
    """Return the gradient where the input was above a threshold."""
    return np.where(self > threshold, grad_output, grad_output.dtype.type(0))


def sigmoid(self: Any) -> Any:
    """Return the logistic function."""
    return 1 / (1 + np.exp(-1.0 * widen(self)))  # unsigned integers have no negative


def sigmoid_backward(grad_output: Any, output: Any) -> Any:
    """Return the gradient of the logistic function."""
    return grad_output * output * (1 - output)


def tanh_backward(grad_output: Any, output: Any) -> Any:
    """Return the gradient of the hyperbolic tangent."""
    return grad_output * (1 - output * output)


def reciprocal(self: Any) -> Any:
    """Return one over each element."""
    return np.true_divide(1, self)


def reciprocal_sqrt(self: Any) -> Any:
    """Return one over the square root."""
    return 1 / np.sqrt(self)


@functools.cache
def _erf() -> Callable[..., Any]:
    return np.vectorize(math.erf, otypes=[np.float64])  # NumPy has none


_SLOPE, _CUBIC = math.sqrt(2 / math.pi), 0.044715  # of the approximation with tanh, as torch has it


def gelu(self: Any, approximate: str = "none") -> Any:
    """Return the Gaussian error linear unit."""
    x = self.astype(np.float64)
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(_SLOPE * (x + _CUBIC * x**3)))
    return 0.5 * x * (1 + _erf()(x / math.sqrt(2)))


def gelu_backward(grad_output: Any, self: Any, approximate: str = "none") -> Any:
    """Return the gradient of the Gaussian error linear unit."""
    x = self.astype(np.float64)
    if approximate == "tanh":
        t = np.tanh(_SLOPE * (x + _CUBIC * x**3))
        slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _SLOPE * (1 + 3 * _CUBIC * x**2)
    else:
        slope = 0.5 * (1 + _erf()(x / math.sqrt(2))) + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return grad_output * slope


KERNELS: dict[str, Callable[..., Any]] = {
    **{f"{name}.out": _unary(ufunc) for name, ufunc in _UNARY.items()},
    **{name: _binary(ufunc) for name, ufunc in _BINARY.items()},
    **{f"{name}.{kind}_out": _binary(f) for name, f in _COMPARISONS.items() for kind in ("Tensor", "Scalar")},
    "add.out": add,
    "sub.out": subtract,
    "div.out": divide,
    "div.out_mode": divide,
    "floor_divide": floor_divide,
    "floor_divide_.Tensor": floor_divide,
    "floor_divide.out": floor_divide,
    "pow.Scalar_out": power,
    "pow.Tensor_Scalar_out": power,
    "pow.Tensor_Tensor_out": power,
    "clamp.out": clamp,
    "clamp_min.out": clamp,
    "clamp_max.out": clamp,
    "addcmul.out": add_product,
    "addcdiv.out": add_quotient,
    "lerp.Scalar_out": interpolate,
    "lerp.Tensor_out": interpolate,
    "fill_.Scalar": fill,
    "fill_.Tensor": fill,
    "zero_": zero,
    "where.self": where,
    "where.self_out": where,
    "masked_fill_.Scalar": masked_fill,
    "masked_fill_.Tensor": masked_fill,
    "isnan": _unary(np.isnan),
    "isneginf.out": _unary(np.isneginf),
    "isposinf.out": _unary(np.isposinf),
    "relu": relu,
    "relu_": relu,
    "threshold_backward.grad_input": threshold_backward,
    "sigmoid.out": sigmoid,
    "sigmoid_backward.grad_input": sigmoid_backward,
    "tanh_backward.grad_input": tanh_backward,
    "reciprocal.out": reciprocal,
    "rsqrt.out": reciprocal_sqrt,
    "gelu.out": gelu,
    "gelu_backward.grad_input": gelu_backward,
}
