"""The ops that are measured, their sizes, and the calls that compute them in a way."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from polycast.plugin import LowBitKernel, find_op, torch_name

from .operands import SMALL, MeasuredWay, Operands

CONVOLUTIONS = ("conv2d", "small_conv2d", "depthwise_conv2d")
ATTENTION, ATTENTION_BACKWARD = "scaled_dot_product_attention", "scaled_dot_product_attention_backward"
OPS = (*("linear", "matmul", *CONVOLUTIONS, "bmm"), *(ATTENTION, ATTENTION_BACKWARD, "lstm", "encoder_layer", "cast"))
_ROWS = (1, 4, 8, 16, 128, 1024)
_FEATURES = (64, 256, 1024)
"""A small size shows what a call costs besides its work. The middle one is that of small models: costs do not grow
linearly up to it."""
_LARGE_ROWS, _LARGE_FEATURES = 4096, 4096
"""For devices that queue calls, which compute smaller matmuls in less time than a call takes."""
_HEADS, _HEAD_FEATURES, _KEYS = 12, 64, 512
_SEQUENCES = _LAYER_HEADS = 4
_ATEN = torch.ops.aten
_LAYER = "aten::_transformer_encoder_layer_fwd"
_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
"""Its backward is measured where torch has this op, on the CPU: elsewhere no dtype is slow enough in it to matter."""
_LSTM = "aten::mkldnn_rnn_layer"
"""LSTMs are measured where torch has this op of oneDNN: the recipe "fastest" chooses a way for no other."""
_PREPACKED_BYTES = 2**26
_COPY_SECONDS = 0.01
_UNKNOWN = "profiles have no attention, LSTM and encoder layer"
_key_of_device: Callable[[str], str] | None = torch_name("torch._C._dispatch_key_for_device", None, _UNKNOWN)
_has_kernel: Callable[[str, str], bool] | None = torch_name(
    "torch._C._dispatch_has_kernel_for_dispatch_key", None, _UNKNOWN
)


def has_kernel(op: str, device_type: str) -> bool:
    """Return whether torch has a kernel for an op on a device, given by its name in the dispatcher."""
    return bool(_has_kernel and _key_of_device and _has_kernel(op, _key_of_device(device_type)))


class Unsupported(Exception):
    """A case cannot be computed in a way; the text says why."""


@dataclass(frozen=True)
class WeightedOp:
    """How to give an op its weight, and which kernels of backends compute it.

    Attributes:
        op_name: the name of the op in the dispatcher.
        position, shape: those of the weight.
        keywords: arguments that kernels get, and that torch's op takes by keyword.
    """

    op_name: str
    position: int
    shape: tuple[int, ...]
    keywords: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class Case:
    """An op of one size.

    Attributes:
        op, rows, size: as in a `Measurement`.
        work: the number of multiplications, or of converted elements: times of an op are about proportional to it.
        function: computes the op. torch's ops are called like the operators of backends, at the same cost of a call.
        arguments: returns the arguments for a way, without the weight.
        weight: None: the op has none, so backends have no kernels for it.
        needs: an op of torch; devices without a kernel for it are not measured. None: all devices are.
        is_large: whether it is for devices that queue calls only: on others it would take too long.
    """

    op: str
    rows: int
    size: int
    work: int
    function: Callable[..., Any]
    arguments: Callable[[MeasuredWay, Operands], tuple[Any, ...]]
    weight: WeightedOp | None = None
    needs: str | None = None
    is_large: bool = False

    @property
    def time_weight(self) -> float:
        """The weight of the case when the time of a pass is divided among the cases."""
        return 1 + (0 if self.is_large else self.work / 2e8)

    def is_for(self, device_type: str, is_queued: bool) -> bool:
        """Return whether it is measured on a device, given whether calls are queued there."""
        if self.is_large and not is_queued:
            return False
        return self.needs is None or has_kernel(self.needs, device_type)

    def is_at_least(self, other: "Case") -> bool:
        """Return whether it has at least the rows and the size of another case."""
        return self.rows >= other.rows and self.size >= other.size

    def check(self, way: MeasuredWay, operands: Operands) -> None:
        """Raise Unsupported if no kernel computes the case in a way."""
        if way.kernels is None or self.weight is None:
            return
        kernel = way.kernels.get(self.weight.op_name)
        if kernel is None:
            raise Unsupported("the backend has no kernel for it")
        weight = _weights(kernel, self.weight, way, operands)[0]
        reason = kernel.unsupported_reason(*self._kernel_arguments(self.weight, way, operands, weight))
        if reason is not None:
            raise Unsupported(reason)

    def prepare(self, way: MeasuredWay, operands: Operands) -> Callable[[], object]:
        """Return a function that computes the case once, with the next weight; raise Unsupported if it has none."""
        args, function, weight = self.arguments(way, operands), self.function, self.weight
        if weight is None:
            return lambda: function(*args)
        if way.kernels is not None:
            return self._by_kernel(way.kernels[weight.op_name], weight, way, operands)
        before, after = args[: weight.position], args[weight.position :]
        weights = operands.weights(*weight.shape, dtype=way.dtype)
        next_weight = operands.in_turn(weights, weights[0].nbytes)
        return lambda: function(*before, next_weight(), *after)

    def _by_kernel(
        self, kernel: LowBitKernel, op: WeightedOp, way: MeasuredWay, operands: Operands
    ) -> Callable[[], object]:
        weights = _weights(kernel, op, way, operands)
        prepacked: Sequence[tuple[torch.Tensor, ...]]
        if kernel.uses_cast:
            prepacked = [(weight,) for weight in weights]
        else:
            prepacked = operands.kept((kernel, op.op_name, op.shape), lambda: _prepack(kernel, weights[0]))
        next_prepacked = operands.in_turn(prepacked, sum(part.nbytes for part in prepacked[0]))
        args = self._kernel_arguments(op, way, operands, weights[0])  # kernels read only the metadata of the weight
        operator, constants = kernel.operator, (way.fast, *kernel.constants)
        if operator is None:
            return lambda: kernel.run(next_prepacked(), *args)
        return lambda: operator(*args, *next_prepacked(), *constants)  # as the native engine calls it

    def _kernel_arguments(
        self, op: WeightedOp, way: MeasuredWay, operands: Operands, weight: torch.Tensor
    ) -> tuple[Any, ...]:
        args = self.arguments(way, operands)
        return (*args[: op.position], weight, *args[op.position :], *op.keywords)


def _weights(kernel: LowBitKernel, op: WeightedOp, way: MeasuredWay, operands: Operands) -> Sequence[torch.Tensor]:
    return operands.weights(*op.shape, dtype=way.dtype if kernel.uses_cast else torch.float32)


def _prepack(kernel: LowBitKernel, weight: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Return a prepacked weight, and copies of it, so that each is read from memory."""
    prepacked = kernel.prepack(weight)
    if prepacked is None:
        raise Unsupported("the weight cannot be prepacked")
    copies = [tuple(prepacked)]
    nbytes = max(1, sum(part.nbytes for part in prepacked))
    deadline = time.perf_counter() + _COPY_SECONDS
    while weight.numel() >= SMALL and nbytes * len(copies) < _PREPACKED_BYTES and time.perf_counter() < deadline:
        copies.append(tuple(part.clone() for part in prepacked))
    return copies


def cases() -> list[Case]:
    """Return the cases, beginning with the least work."""
    large = (replace(case, is_large=True) for case in _large_cases())
    return sorted([*_all_cases(), *large], key=lambda case: case.work)


def _all_cases() -> Iterator[Case]:
    for features in _FEATURES:
        for rows in _ROWS:
            yield _linear(rows, features)
            yield _matmul(rows, features)
    for images, channels, pixels in ((2, 16, 14), (2, 128, 4), (1, 64, 28), (1, 128, 28), (4, 128, 28)):
        yield _conv2d("conv2d", images, channels, pixels)
    # torch convolves one small image in float32 by a matmul. For some few pixels that takes longer than for more.
    for channels in (16, 64):
        for pixels in (1, 3, 4, 8):
            yield _conv2d("small_conv2d", 1, channels, pixels)
    for pixels in (28, 56):
        yield _conv2d("depthwise_conv2d", 1, 96, pixels, groups=96)
    for rows in (1, 16, 128, 1024):
        yield _bmm(rows)
    for rows in (1, 16, 128, 512):
        yield _attention(rows, _HEADS, _KEYS)
    for rows in (1, 16, 64):
        yield _attention(rows, 4, 64)
    if find_op(_ATTENTION) is not None:
        for rows in (8, 64, 128):
            yield _attention_backward(rows, 4)
    for features in (64, 128):
        yield _lstm(20, 4, features)
    if find_op(_LAYER) is not None:
        for rows, features in ((16, 128), (128, 128), (512, 128), (128, 512)):
            yield _encoder_layer(rows, features)
    for elements in (1, 64, 4096, 2**16, 2**20):
        yield _cast(elements)


def _large_cases() -> Iterator[Case]:
    sizes = [(_LARGE_ROWS, features) for features in _FEATURES]
    for rows, features in (*sizes, *((rows, _LARGE_FEATURES) for rows in (1, 16, 128, 1024, _LARGE_ROWS))):
        yield _linear(rows, features)
        yield _matmul(rows, features)
    for images, channels, pixels in ((32, 16, 14), (32, 64, 56), (32, 256, 14)):
        yield _conv2d("conv2d", images, channels, pixels)
    yield _conv2d("depthwise_conv2d", 32, 96, 56, groups=96)
    for rows, batch in ((_LARGE_ROWS, _HEADS), (1, 16 * _HEADS), (128, 16 * _HEADS), (1024, 16 * _HEADS)):
        yield _bmm(rows, batch)
    yield _attention(2048, 4, 64)
    for rows in (1, 2048):
        yield _attention(rows, 32, 2048)
    if find_op(_LAYER) is not None:
        yield _encoder_layer(_LARGE_ROWS, 512)
    for elements in (2**22, 2**24):
        yield _cast(elements)


def _linear(rows: int, features: int) -> Case:
    def arguments(way: MeasuredWay, operands: Operands) -> tuple[Any, ...]:
        return *operands.activations((rows, features), dtype=way.dtype), None

    size = features * features
    weight = WeightedOp("aten::linear", 1, (features, features))
    return Case("linear", rows, size, rows * size, _ATEN.linear.default, arguments, weight)


def _matmul(rows: int, features: int) -> Case:
    def arguments(way: MeasuredWay, operands: Operands) -> tuple[Any, ...]:
        return operands.activations((features,), (rows, features), dtype=way.dtype)

    size = features * features
    weight = WeightedOp("aten::addmm", 2, (features, features), keywords=(1, 1))
    return Case("matmul", rows, size, rows * size, _ATEN.addmm.default, arguments, weight)


def _conv2d(op: str, images: int, channels: int, pixels: int, groups: int = 1) -> Case:
    def arguments(way: MeasuredWay, operands: Operands) -> tuple[Any, ...]:
        (x,) = operands.activations((images, channels, pixels, pixels), dtype=way.dtype)
        return x, None, [1, 1], [1, 1], [1, 1], groups

    shape = (channels, channels // groups, 3, 3)
    rows, size = images * pixels * pixels, math.prod(shape)
    weight = WeightedOp("aten::conv2d", 1, shape)
    return Case(op, rows, size, rows * size, _ATEN.conv2d.default, arguments, weight)


def _bmm(rows: int, batch: int = _HEADS) -> Case:
    def arguments(way: MeasuredWay, operands: Operands) -> tuple[Any, ...]:
        shapes = (batch, rows, _HEAD_FEATURES), (batch, _HEAD_FEATURES, _KEYS)
        return operands.activations(*shapes, dtype=way.dtype)

    size = batch * _HEAD_FEATURES * _KEYS
    return Case("bmm", rows, size, rows * size, _ATEN.bmm.default, arguments)


def _attention(rows: int, heads: int, keys: int) -> Case:
    def arguments(way: MeasuredWay, operands: Operands) -> tuple[Any, ...]:
        query, key = (1, heads, rows, _HEAD_FEATURES), (1, heads, keys, _HEAD_FEATURES)
        return operands.activations(query, key, key, dtype=way.dtype)

    size = 2 * heads * _HEAD_FEATURES * keys
    return Case(ATTENTION, rows, size, rows * size, _ATEN.scaled_dot_product_attention.default, arguments)


def _attention_backward(rows: int, heads: int) -> Case:
    """Return a case of the backward op of an attention of a sequence to itself.

    Autograd is not used: it would call the saved tensors hooks of the program that measures.
    """
    forward = _attention(rows, heads, rows)
    forward_op: Any = find_op(_ATTENTION)
    backward_op: Any = find_op(f"{_ATTENTION}_backward")

    def arguments(way: MeasuredWay, operands: Operands) -> tuple[Any, ...]:
        inputs = forward.arguments(way, operands)
        result, logsumexp = forward_op(*inputs)
        return result, *inputs, result, logsumexp, 0.0, False

    return replace(
        forward, op=ATTENTION_BACKWARD, function=backward_op, arguments=arguments, needs=f"{_ATTENTION}_backward"
    )


def _lstm(steps: int, batch: int, features: int) -> Case:
    def arguments(way: MeasuredWay, operands: Operands) -> tuple[Any, ...]:
        state, weight, bias = (1, batch, features), (4 * features, features), (4 * features,)
        shapes = (steps, batch, features), state, state, weight, weight, bias, bias
        x, *made = operands.activations(*shapes, dtype=way.dtype)
        return x, made[:2], made[2:], True, 1, 0.0, False, False, False

    rows, size = steps * batch, 2 * 4 * features * features
    return Case("lstm", rows, size, rows * size, _ATEN.lstm.input, arguments, needs=_LSTM)


def _encoder_layer(rows: int, features: int) -> Case:
    def arguments(way: MeasuredWay, operands: Operands) -> tuple[Any, ...]:
        x, *made = operands.activations((_SEQUENCES, rows // _SEQUENCES, features), *shapes, dtype=way.dtype)
        return x, features, _LAYER_HEADS, *made[:4], False, False, 1e-5, *made[4:]

    hidden = 4 * features
    attention = ((3 * features, features), (3 * features,), (features, features), (features,))
    norms = ((features,),) * 4
    shapes = (*attention, *norms, (hidden, features), (hidden,), (features, hidden), (features,))
    size = 12 * features**2
    layer: Any = find_op(_LAYER)
    return Case("encoder_layer", rows, size, rows * size, layer, arguments)


def _cast(elements: int) -> Case:
    def arguments(way: MeasuredWay, operands: Operands) -> tuple[Any, ...]:
        source, target = (torch.float32, way.fast) if way.name.startswith("to ") else (way.fast, torch.float32)
        return *operands.activations((elements,), dtype=source), target

    return Case("cast", elements, 1, elements, torch.Tensor.to, arguments)
