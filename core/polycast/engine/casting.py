"""Which tensors autocast may cast, and what it casts them to; over the arguments of an op and over containers.

Eligible means what torch's autocast means by it (ATen/autocast_mode.h, ``is_eligible``): a floating-point tensor on the
region's device that is not float64.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def is_eligible(value: object, device_type: str) -> bool:
    """Say whether autocast for `device_type` may cast a value."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == device_type
    )


def promotion(values: Iterable[object], device_type: str) -> torch.dtype | None:
    """Return the dtype that the eligible tensors among `values` promote to, or None if they stay as they are.

    Tensors of one dtype stay as they are. Otherwise it is float32, the narrowest dtype that holds the values of two
    different reduced ones (torch raises for float16 with bfloat16).
    """
    dtypes = {value.dtype for value in tensors_in(values) if is_eligible(value, device_type)}
    return torch.float32 if len(dtypes) > 1 else None


def tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Return the tensors among values, also in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def cast_nested(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Return `value` with every eligible tensor in it cast, through mappings, lists, tuples, sets and iterators.

    A container in which nothing is cast is returned itself, for who gets it may write to it.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype is not dtype and is_eligible(value, device_type) else value
    if isinstance(value, Mapping):
        items = {key: cast_nested(item, device_type, dtype) for key, item in value.items()}
        if all(item is value[key] for key, item in items.items()):
            return value
        if type(value) is dict or not isinstance(value, MutableMapping):
            return items
        copied = copy.copy(value)  # such as what models of transformers return, which have attributes too
        copied.update(items)
        return copied
    if isinstance(value, (list, tuple, set, frozenset)):
        elements = [cast_nested(item, device_type, dtype) for item in value]
        if all(item is old for item, old in zip(elements, value, strict=True)):
            return value
        return type(value)(*elements) if hasattr(value, "_fields") else type(value)(elements)
    if isinstance(value, Iterator):
        return (cast_nested(item, device_type, dtype) for item in value)
    return value
