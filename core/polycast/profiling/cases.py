"""The ops that are measured, and their sizes."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ..plugins.backend import LowBitKernel
from .operands import SMALL, Operands
from .ways import Way

Call: TypeAlias = Callable[[], object]
OPS = ("linear", "matmul", "conv2d", "bmm", "scaled_dot_product_attention", "cast")
_ROWS = (1, 4, 16, 128, 1024)
_FEATURES = (64, 1024)
"""A small size shows what a call costs besides its work."""
_PREPACKED_BYTES = 2**26
_COPY_SECONDS = 0.05


class _ATEN:
    """Torch's operators, called like the operators of backends, so that all calls from Python cost the same."""

    linear = torch.ops.aten.linear.default
    addmm = torch.ops.aten.addmm.default
    conv2d = torch.ops.aten.conv2d.default
    bmm = torch.ops.aten.bmm.default
    scaled_dot_product_attention = torch.ops.aten.scaled_dot_product_attention.default


class Unsupported(Exception):
    """An op cannot be computed in a way; the text says why."""


@dataclass(frozen=True, eq=False)
class Case:
    """An op of one size.

    Attributes:
        op, rows, size: as in a `Measurement`.
        work: the number of multiplications, or of converted elements: times of an op are about proportional to it.
        has_weight: whether it multiplies by a weight, so that backends may have kernels for it.
        prepare: returns a function that computes the op once, in a way with these operands. Raises Unsupported.
    """

    op: str
    rows: int
    size: int
    work: int
    has_weight: bool
    prepare: Callable[[Way, Operands], Call]

    @property
    def weight(self) -> float:
        """The share of the time, relative to other cases."""
        return 1 + self.work / 2e8

    def contains(self, other: "Case") -> bool:
        """Return whether another case has no more rows and no larger size."""
        return self.rows >= other.rows and self.size >= other.size


def cases() -> list[Case]:
    """Return the cases, beginning with the least work."""
    return sorted([*_linears(), *_convolutions(), *_batches(), *_casts()], key=lambda case: case.work)


def _linears() -> Iterator[Case]:
    for features in _FEATURES:
        for rows in _ROWS:
            size = features * features
            yield Case("linear", rows, size, rows * size, True, _linear(rows, features))
            yield Case("matmul", rows, size, rows * size, True, _matmul(rows, features))


def _linear(rows: int, features: int) -> Callable[[Way, Operands], Call]:
    def prepare(way: Way, operands: Operands) -> Call:
        x = operands.activation(rows, features, dtype=way.dtype)
        if way.kernels is not None:
            return _by_kernel("aten::linear", (x, None, None), way, operands, (features, features))
        next_weight = _weights(way.dtype, operands, (features, features))
        return lambda: _ATEN.linear(x, next_weight())

    return prepare


def _matmul(rows: int, features: int) -> Callable[[Way, Operands], Call]:
    def prepare(way: Way, operands: Operands) -> Call:
        x = operands.activation(rows, features, dtype=way.dtype)
        bias = operands.activation(features, dtype=way.dtype)
        if way.kernels is not None:
            return _by_kernel("aten::addmm", (bias, x, None, 1, 1), way, operands, (features, features))
        next_weight = _weights(way.dtype, operands, (features, features))
        return lambda: _ATEN.addmm(bias, x, next_weight())

    return prepare


def _convolutions() -> Iterator[Case]:
    for images, channels, pixels in ((1, 16, 14), (1, 64, 28), (1, 128, 28), (4, 128, 28)):
        rows, size = images * pixels * pixels, channels * channels * 9
        yield Case("conv2d", rows, size, rows * size, True, _conv2d(images, channels, pixels))


def _conv2d(images: int, channels: int, pixels: int) -> Callable[[Way, Operands], Call]:
    def prepare(way: Way, operands: Operands) -> Call:
        x = operands.activation(images, channels, pixels, pixels, dtype=way.dtype)
        shape = (channels, channels, 3, 3)
        if way.kernels is not None:
            args = (x, None, None, [1, 1], [1, 1], [1, 1], 1)
            return _by_kernel("aten::conv2d", args, way, operands, shape)
        next_weight = _weights(way.dtype, operands, shape)
        return lambda: _ATEN.conv2d(x, next_weight(), None, [1, 1], [1, 1])

    return prepare


def _batches() -> Iterator[Case]:
    heads, features, keys = 12, 64, 512
    for rows in (1, 16, 128, 1024):
        size = heads * features * keys
        yield Case("bmm", rows, size, rows * size, False, _bmm(heads, rows, features, keys))
    for rows in (1, 16, 128, 512):
        size = 2 * heads * features * keys
        name = "scaled_dot_product_attention"
        yield Case(name, rows, size, rows * size, False, _attention(heads, rows, features, keys))


def _bmm(heads: int, rows: int, features: int, keys: int) -> Callable[[Way, Operands], Call]:
    def prepare(way: Way, operands: Operands) -> Call:
        one = operands.activation(heads, rows, features, dtype=way.dtype)
        other = operands.activation(heads, features, keys, dtype=way.dtype, after=one)
        return lambda: _ATEN.bmm(one, other)

    return prepare


def _attention(heads: int, rows: int, features: int, keys: int) -> Callable[[Way, Operands], Call]:
    def prepare(way: Way, operands: Operands) -> Call:
        query = operands.activation(1, heads, rows, features, dtype=way.dtype)
        key = operands.activation(1, heads, keys, features, dtype=way.dtype, after=query)
        value = operands.activation(1, heads, keys, features, dtype=way.dtype, after=key)
        return lambda: _ATEN.scaled_dot_product_attention(query, key, value)

    return prepare


def _casts() -> Iterator[Case]:
    for elements in (1, 64, 4096, 2**16, 2**20):
        yield Case("cast", elements, 1, elements, False, _cast(elements))


def _cast(elements: int) -> Callable[[Way, Operands], Call]:
    def prepare(way: Way, operands: Operands) -> Call:
        source, target = (torch.float32, way.fast) if way.name.startswith("to ") else (way.fast, torch.float32)
        x = operands.activation(elements, dtype=source)
        return lambda: x.to(target)

    return prepare


def _weights(dtype: torch.dtype, operands: Operands, shape: tuple[int, ...]) -> Callable[[], torch.Tensor]:
    weights = operands.weights(*shape, dtype=dtype)
    return operands.in_turn(weights, weights[0].nbytes)


def _by_kernel(op: str, args: Sequence[Any], way: Way, operands: Operands, shape: tuple[int, ...]) -> Call:
    """Return a function that calls the kernel of an op; the weight, None in `args`, is taken from the operands."""
    assert way.kernels is not None
    kernel = way.kernels.get(op)
    if kernel is None:
        raise Unsupported("the backend has no kernel for it")
    weights = operands.weights(*shape, dtype=way.fast if kernel.uses_cast else torch.float32)
    before, after = args[: kernel.weight], args[kernel.weight + 1 :]
    reason = kernel.unsupported_reason(*before, weights[0], *after)
    if reason is not None:
        raise Unsupported(reason)
    prepacked: list[tuple[torch.Tensor, ...]]
    if kernel.uses_cast:
        prepacked = [(weight,) for weight in weights]
    elif (kernel, op, shape) in operands.prepacked:
        prepacked = operands.prepacked[kernel, op, shape]
    else:
        prepacked = operands.prepacked[kernel, op, shape] = _prepack(kernel, weights[0])
    next_prepacked = operands.in_turn(prepacked, sum(part.nbytes for part in prepacked[0]))
    weight = weights[0]  # kernels read its metadata only
    operator, end = kernel.operator, (way.fast, *kernel.constants)

    def run() -> Any:
        return kernel.run(next_prepacked(), *before, weight, *after)

    def run_operator() -> Any:  # as the native engine calls it
        return operator(*before, weight, *after, *next_prepacked(), *end)  # type: ignore[misc]

    return run if operator is None else run_operator


def _prepack(kernel: LowBitKernel, weight: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Return a prepacked weight, and copies of it, so that each is read from memory."""
    packed = kernel.prepack(weight)
    if packed is None:
        raise Unsupported("the weight cannot be prepacked")
    copies = [tuple(packed)]
    nbytes = max(1, sum(part.nbytes for part in packed))
    deadline = time.perf_counter() + _COPY_SECONDS
    while weight.numel() >= SMALL and nbytes * len(copies) < _PREPACKED_BYTES and time.perf_counter() < deadline:
        copies.append(tuple(part.clone() for part in packed))
    return copies
