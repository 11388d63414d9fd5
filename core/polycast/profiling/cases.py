"""The ops that are measured, and their sizes."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from ..plugins.backend import LowBitKernel
from .operands import Operands
from .ways import Way, uses_cast

Call: TypeAlias = Callable[[], object]
_ROWS = (1, 4, 16, 128, 1024)
_FEATURES = (64, 1024)
"""A small size shows what a call costs besides its work."""
_PREPACK_SECONDS = 0.05


class Unsupported(Exception):
    """An op cannot be computed in a way; the text says why."""


@dataclass(frozen=True)
class Case:
    """An op of one size.

    Attributes:
        op, rows, size: as in a `Measurement`.
        work: the number of multiplications, or of converted elements: times of an op are about proportional to it.
        prepare: returns a function that computes the op once, in a way with these operands. Raises Unsupported.
    """

    op: str
    rows: int
    size: int
    work: int
    prepare: Callable[[Way, Operands], Call]


def cases() -> list[Case]:
    """Return the cases, beginning with the least work."""
    return sorted([*_linears(), *_convolutions(), *_batches(), *_casts()], key=lambda case: case.work)


def _linears() -> Iterator[Case]:
    for features in _FEATURES:
        for rows in _ROWS:
            size = features * features
            yield Case("linear", rows, size, rows * size, _linear(rows, features))
            yield Case("matmul", rows, size, rows * size, _matmul(rows, features))


def _linear(rows: int, features: int) -> Callable[[Way, Operands], Call]:
    def prepare(way: Way, operands: Operands) -> Call:
        x = operands.activation(rows, features, dtype=way.dtype)
        if way.kernels is not None:
            return _by_kernel("aten::linear", (x, None, None), way, operands, (features, features))
        next_weight = _weights(way.dtype, operands, (features, features))
        return lambda: F.linear(x, next_weight())

    return prepare


def _matmul(rows: int, features: int) -> Callable[[Way, Operands], Call]:
    def prepare(way: Way, operands: Operands) -> Call:
        x = operands.activation(rows, features, dtype=way.dtype)
        bias = operands.activation(features, dtype=way.dtype)
        if way.kernels is not None:
            return _by_kernel("aten::addmm", (bias, x, None, 1, 1), way, operands, (features, features))
        next_weight = _weights(way.dtype, operands, (features, features))
        return lambda: torch.addmm(bias, x, next_weight())

    return prepare


def _convolutions() -> Iterator[Case]:
    for images, channels, pixels in ((1, 16, 14), (1, 128, 28), (4, 128, 28)):
        rows, size = images * pixels * pixels, channels * channels * 9
        yield Case("conv2d", rows, size, rows * size, _conv2d(images, channels, pixels))


def _conv2d(images: int, channels: int, pixels: int) -> Callable[[Way, Operands], Call]:
    def prepare(way: Way, operands: Operands) -> Call:
        x = operands.activation(images, channels, pixels, pixels, dtype=way.dtype)
        shape = (channels, channels, 3, 3)
        if way.kernels is not None:
            args = (x, None, None, [1, 1], [1, 1], [1, 1], 1)
            return _by_kernel("aten::conv2d", args, way, operands, shape)
        next_weight = _weights(way.dtype, operands, shape)
        return lambda: F.conv2d(x, next_weight(), padding=1)

    return prepare


def _batches() -> Iterator[Case]:
    heads, features, keys = 12, 64, 512
    for rows in (1, 16, 128, 1024):
        size = heads * features * keys
        yield Case("bmm", rows, size, rows * size, _bmm(heads, rows, features, keys))
    for rows in (1, 16, 128, 512):
        size = 2 * heads * features * keys
        name = "scaled_dot_product_attention"
        yield Case(name, rows, size, rows * size, _attention(heads, rows, features, keys))


def _bmm(heads: int, rows: int, features: int, keys: int) -> Callable[[Way, Operands], Call]:
    def prepare(way: Way, operands: Operands) -> Call:
        _check_plain(way)
        one = operands.activation(heads, rows, features, dtype=way.dtype)
        other = operands.activation(heads, features, keys, dtype=way.dtype)
        return lambda: torch.bmm(one, other)

    return prepare


def _attention(heads: int, rows: int, features: int, keys: int) -> Callable[[Way, Operands], Call]:
    def prepare(way: Way, operands: Operands) -> Call:
        _check_plain(way)
        query = operands.activation(1, heads, rows, features, dtype=way.dtype)
        key = operands.activation(1, heads, keys, features, dtype=way.dtype)
        value = key.clone()
        return lambda: F.scaled_dot_product_attention(query, key, value)

    return prepare


def _casts() -> Iterator[Case]:
    for elements in (1, 4096, 2**20):
        yield Case("cast", elements, 1, elements, _cast(elements))


def _cast(elements: int) -> Callable[[Way, Operands], Call]:
    def prepare(way: Way, operands: Operands) -> Call:
        source, target = (torch.float32, way.fast) if way.name.startswith("to ") else (way.fast, torch.float32)
        x = operands.activation(elements, dtype=source)
        return lambda: x.to(target)

    return prepare


def _check_plain(way: Way) -> None:
    if way.kernels is not None:
        raise Unsupported("it has no weight")


def _weights(dtype: torch.dtype, operands: Operands, shape: Sequence[int]) -> Callable[[], torch.Tensor]:
    weights = operands.weights(*shape, dtype=dtype)
    return operands.in_turn(weights, weights[0].nbytes)


def _by_kernel(op: str, args: Sequence[Any], way: Way, operands: Operands, shape: Sequence[int]) -> Call:
    """Return a function that calls the kernel of an op; the weight, None in `args`, is taken from the operands."""
    assert way.kernels is not None
    kernel = way.kernels.get(op)
    if kernel is None:
        raise Unsupported("the backend has no kernel for it")
    weights = operands.weights(*shape, dtype=way.fast if uses_cast(kernel) else torch.float32)
    before, after = args[: kernel.weight], args[kernel.weight + 1 :]
    reason = kernel.unsupported_reason(*before, weights[0], *after)
    if reason is not None:
        raise Unsupported(reason)
    prepacked = [(weight,) for weight in weights] if uses_cast(kernel) else _prepack(kernel, weights)
    next_weight = operands.in_turn(list(zip(weights, prepacked, strict=False)), weights[0].nbytes)

    def run() -> torch.Tensor:
        weight, packed = next_weight()
        return kernel.run(packed, *before, weight, *after)

    return run


def _prepack(kernel: LowBitKernel, weights: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """Return prepacked weights, as many as a short time allows."""
    prepacked = []
    deadline = time.perf_counter() + _PREPACK_SECONDS
    for weight in weights:
        packed = kernel.prepack(weight)
        if packed is None:
            raise Unsupported("the weight cannot be prepacked")
        prepacked.append(tuple(packed))
        if time.perf_counter() > deadline:
            break
    return prepacked
