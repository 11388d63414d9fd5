"""`Workload`: the size of a call's work, read from the metadata of its arguments.

Of calls with a weight or a second operand: matmuls, convolutions, attention, recurrent and encoder layers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .cases import ATTENTION

RECURRENT = "lstm"
ENCODER_LAYER = "encoder_layer"
_FEW = 20480
"""For one image of at most this many elements, torch may not use oneDNN; see ``use_mkldnn`` in its Convolution.cpp."""


class Workload(NamedTuple):
    """The size of a call's work, in the terms of a device profile.

    Attributes:
        op: the op of the profile: ``"linear"``, ``"matmul"``, ``"bmm"``, a convolution's, `ATTENTION`, `RECURRENT` or
            `ENCODER_LAYER`.
        rows: of the activations; for convolutions, positions of the result; for bmm and attention, of one matrix of the
            batch.
        size: the elements of the weight, or of the second matrix; for attention, of keys and values.
        result: the elements of the result.
        inner: the reduced dimension (K) of a matmul; 0 for others, whose gradients are not computed as matmuls.
    """

    op: str
    rows: int
    size: int
    result: int
    inner: int = 0


def workload_of(op: str, args: Sequence[Any]) -> Workload | None:
    """Return the work of a call, whose values are not read; None if profiles do not cover the op or these arguments."""
    read = _READERS.get(op)
    found = None if read is None else read(*args)
    return None if found is None or min(found[1:4]) <= 0 else found


def weight_position(op: str) -> int:
    """Return the position of the weight, or of the second matrix, among the arguments of an op."""
    return _WEIGHT_POSITIONS.get(op, 1)


_WEIGHT_POSITIONS = {
    "aten::addmm": 2,
    "aten::_addmm_activation": 2,
    "aten::baddbmm": 2,
    "aten::_native_multi_head_attention": 5,
    "aten::_transformer_encoder_layer_fwd": 3,
}


def size_hint(size: Any) -> int:
    """Return a size; of a symbolic one, the example that the compiler was given, without a guard on it, or 0."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return hint if isinstance(hint, int) else 0


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(map(size_hint, tensor.shape))


def layout_of(matrix: torch.Tensor) -> str:
    """Return the profile's op for a matmul by a matrix [K, N]: ``"linear"`` if it is a contiguous one's transpose."""
    rows, columns = (size_hint(stride) for stride in matrix.stride()[-2:])
    return "linear" if rows == 1 and columns != 1 else "matmul"


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Workload | None:
    sizes = _sizes(x)
    if weight.dim() != 2 or not sizes:
        return None
    features, inner = _sizes(weight)
    rows = math.prod(sizes[:-1])
    op = "linear" if layout_of(weight) == "matmul" else "matmul"
    return Workload(op, rows, features * inner, rows * features, inner)


def _mm(x: torch.Tensor, weight: torch.Tensor) -> Workload | None:
    if weight.dim() != 2 or x.dim() < 2:
        return None
    rows = math.prod(_sizes(x)[:-1])
    inner, columns = _sizes(weight)
    return Workload(layout_of(weight), rows, inner * columns, rows * columns, inner)


def _addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *scalars: Any) -> Workload | None:
    return None if any(isinstance(each, complex) for each in scalars) else _mm(x, weight)


def _bmm(x: torch.Tensor, other: torch.Tensor) -> Workload | None:
    if x.dim() < 2 or other.dim() < 2:
        return None
    (*batch, rows, _), (*others, inner, columns) = _sizes(x), _sizes(other)
    if len(batch) < len(others):
        batch, others = others, batch
    count = math.prod(max(pair) for pair in zip(batch, [1] * (len(batch) - len(others)) + others, strict=True))
    return Workload("bmm", rows, count * inner * columns, count * rows * columns, inner)


def _baddbmm(bias: torch.Tensor, x: torch.Tensor, other: torch.Tensor, *scalars: Any) -> Workload | None:
    return None if any(isinstance(each, complex) for each in scalars) else _bmm(x, other)


def _matmul(x: torch.Tensor, other: torch.Tensor) -> Workload | None:
    return _mm(x, other) if other.dim() == 2 else _bmm(x, other)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Workload | None:
    if min(query.dim(), key.dim(), value.dim()) < 3:
        return None
    rows = _sizes(query)[-2]
    count = math.prod(_sizes(query)[:-2])
    size = math.prod(_sizes(key)) + math.prod(_sizes(value))
    return Workload(ATTENTION, rows, size, count * rows * _sizes(value)[-1])


def _fused_attention(query: torch.Tensor, *others: Any) -> Workload | None:
    """Return the linears before and after the attention, which are most of the work where there are few keys."""
    qkv_weight, proj_weight = others[4], others[6]
    rows = math.prod(_sizes(query)[:-1])
    size = math.prod(_sizes(qkv_weight)) + math.prod(_sizes(proj_weight))
    return Workload("linear", rows, size, math.prod(_sizes(query)))


def _encoder_layer(x: torch.Tensor, *others: Any) -> Workload | None:
    """Return the four linears, which are most of the work where sequences are short."""
    rows = math.prod(_sizes(x)[:-1])
    size = sum(math.prod(_sizes(others[at])) for at in (2, 4, 13, 15))
    return Workload(ENCODER_LAYER, rows, size, math.prod(_sizes(x)))


def _recurrent(x: torch.Tensor, of_input: torch.Tensor, of_state: torch.Tensor, *_: Any) -> Workload | None:
    rows = math.prod(_sizes(x)[:-1])
    return Workload(
        RECURRENT, rows, math.prod(_sizes(of_input)) + math.prod(_sizes(of_state)), rows * _sizes(of_state)[-1]
    )


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Workload | None:
    axes = weight.dim() - 2
    if axes < 1 or x.dim() not in (axes + 1, axes + 2):
        return None
    sizes, kernel = _sizes(x), _sizes(weight)[2:]
    strides, dilations = _numbers(stride, axes), _numbers(dilation, axes)
    paddings = _numbers(0 if isinstance(padding, str) else padding, axes)
    if {len(strides), len(dilations), len(paddings)} != {axes} or min(strides) <= 0:
        return None  # torch says what is wrong
    images = sizes[0] if x.dim() == axes + 2 else 1
    spans = kernel_spans(dilations, kernel)
    margins = spans if padding == "same" else [2 * each for each in paddings]
    positions = images * math.prod(
        (size + margin - span - 1) // step + 1
        for size, margin, span, step in zip(sizes[-axes:], margins, spans, strides, strict=True)
    )
    size = math.prod(_sizes(weight))
    op = _convolution_op(images, math.prod(sizes), _sizes(weight), groups)
    return Workload(op, positions, size, positions * _sizes(weight)[0])


def _convolution_op(images: int, elements: int, weight: tuple[int, ...], groups: int) -> str:
    """Return the op of the profile for a convolution: torch has kernels for some that it uses for no others."""
    if groups > 1:
        return "depthwise_conv2d" if weight[1] == 1 else "conv2d"
    is_large_kernel = len(weight) > 3 and min(weight[-2:]) > 3
    return "small_conv2d" if images == 1 and elements <= _FEW and not is_large_kernel else "conv2d"


def by_axis(given: Any, axes: int) -> list[Any]:
    """Return a number for each axis, given those, or one for all axes."""
    numbers = list(given) if isinstance(given, Sequence) else [given]
    return numbers * axes if len(numbers) == 1 else numbers


def kernel_spans(dilations: Sequence[int], kernel: Sequence[int]) -> list[int]:
    """Return how far apart the first and the last element of a dilated kernel are on each axis.

    Padding by the name ``"same"`` adds as much, on both sides together.
    """
    return [step * (size - 1) for step, size in zip(dilations, kernel, strict=True)]


def _numbers(given: Any, axes: int) -> list[int]:
    return list(map(size_hint, by_axis(given, axes)))


_READERS: Mapping[str, Callable[..., Workload | None]] = {
    "aten::linear": _linear,
    "aten::mm": _mm,
    "aten::addmm": _addmm,
    "aten::_addmm_activation": _addmm,
    "aten::_native_multi_head_attention": _fused_attention,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::matmul": _matmul,
    "aten::bmm": _bmm,
    "aten::baddbmm": _baddbmm,
    f"aten::{ATTENTION}": _attention,
    **{f"aten::conv{axes}d{overload}": _convolution for axes in (1, 2, 3) for overload in ("", ".padding")},
}
