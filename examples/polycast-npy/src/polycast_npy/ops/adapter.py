"""From tensors to arrays and back: a function of NumPy arrays as the kernel of an op."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..tensors import array, from_array


def find(name: str) -> torch._ops.OpOverload:
    """Return an op of torch by its name, such as ``"add.out"``."""
    packet, _, overload = name.partition(".")
    op: torch._ops.OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return op


class ArrayKernel:
    """The kernel of an op: calls a function on the arrays of its inputs.

    What the function returns is written to the tensors that the op's schema says are written to (``self`` of an
    in-place op, ``out``), or is made into new tensors.
    """

    def __init__(self, op: torch._ops.OpOverload, function: Callable[..., Any]) -> None:
        self._function = function
        arguments = op._schema.arguments
        self._names = [argument.name for argument in arguments]
        self._written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        self._outputs = [a.name for a in arguments if a.kwarg_only and a.name in self._written]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the op, with the arguments as the dispatcher passes them."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        outputs = [given.pop(name) for name in self._outputs]
        targets = outputs or [given[name] for name in self._written]
        with np.errstate(all="ignore"):  # as on any device: infinity and NaN are values
            results = self._function(**{name: _to_array(value) for name, value in given.items()})
            if not targets:
                return _to_tensor(results)
            for target, result in zip(targets, results if isinstance(results, tuple) else (results,), strict=True):
                _write(target, result)
        return targets[0] if len(targets) == 1 else tuple(targets)


def _to_array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # A number that the CPU holds takes part as a number: it does not widen the result.
        return value.item() if value.device.type == "cpu" and value.dim() == 0 else array(value)
    if isinstance(value, (list, tuple)):
        return [_to_array(item) for item in value]
    return value


def _to_tensor(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(map(_to_tensor, result))
    return from_array(result) if isinstance(result, (np.ndarray, np.generic)) else result


def _write(target: torch.Tensor, result: Any) -> None:
    shape = np.shape(result)
    if target.shape != shape and target.numel() == 0:
        target.resize_(shape)
    np.copyto(array(target), result, casting="unsafe")


def widen(values: Any) -> Any:
    """Return float16 values as float32, to compute in; others as they are."""
    return values.astype(np.float32) if values.dtype == np.float16 else values


def in_range(indices: Any, length: int) -> Any:
    """Return indices that are within a dimension.

    Raises:
        IndexError: one is not. NumPy would count a negative one from the end.
    """
    outside = (indices < 0) | (indices >= length)
    if np.any(outside):
        raise IndexError(f"index {np.extract(outside, indices)[0]} is out of bounds for a dimension of size {length}")
    return indices
