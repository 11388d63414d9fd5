"""Prepare the calls that compute a case in a way."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from polycast.plugin import LowBitKernel

from .cases import Case, WeightedOp
from .operands import SMALL, Operands
from .ways import MeasuredWay

MeasuredCall: TypeAlias = Callable[[], object]
_PREPACKED_BYTES = 2**26
_COPY_SECONDS = 0.01


class Unsupported(Exception):
    """A case cannot be computed in a way; the text says why."""


def check(case: Case, way: MeasuredWay, operands: Operands) -> None:
    """Raise Unsupported if no kernel computes a case in a way."""
    if way.kernels is None or case.weight is None:
        return
    kernel = way.kernels.get(case.weight.op_name)
    if kernel is None:
        raise Unsupported("the backend has no kernel for it")
    weight = _weights(kernel, case.weight, way, operands)[0]
    reason = kernel.unsupported_reason(*_arguments(case, case.weight, way, operands, weight))
    if reason is not None:
        raise Unsupported(reason)


def prepare(case: Case, way: MeasuredWay, operands: Operands) -> MeasuredCall:
    """Return a function that computes a case once, with the next weight.

    Raises:
        Unsupported: the weight cannot be prepacked.
    """
    args, function = case.arguments(way, operands), case.function
    if case.weight is None:
        return lambda: function(*args)
    if way.kernels is not None:
        return _by_kernel(way.kernels[case.weight.op_name], case, case.weight, way, operands)
    before, after = args[: case.weight.position], args[case.weight.position :]
    weights = operands.weights(*case.weight.shape, dtype=way.dtype)
    next_weight = operands.in_turn(weights, weights[0].nbytes)
    return lambda: function(*before, next_weight(), *after)


def _by_kernel(kernel: LowBitKernel, case: Case, op: WeightedOp, way: MeasuredWay, operands: Operands) -> MeasuredCall:
    weights = _weights(kernel, op, way, operands)
    prepacked: Sequence[tuple[torch.Tensor, ...]]
    if kernel.uses_cast:
        prepacked = [(weight,) for weight in weights]
    else:
        prepacked = operands.kept((kernel, op.op_name, op.shape), lambda: _prepack(kernel, weights[0]))
    next_prepacked = operands.in_turn(prepacked, sum(part.nbytes for part in prepacked[0]))
    args = _arguments(case, op, way, operands, weights[0])  # kernels read only the metadata of the weight
    operator, constants = kernel.operator, (way.fast, *kernel.constants)
    if operator is None:
        return lambda: kernel.run(next_prepacked(), *args)
    return lambda: operator(*args, *next_prepacked(), *constants)  # as the native engine calls it


def _arguments(
    case: Case, op: WeightedOp, way: MeasuredWay, operands: Operands, weight: torch.Tensor
) -> tuple[Any, ...]:
    """Return the arguments of a kernel."""
    args = case.arguments(way, operands)
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
