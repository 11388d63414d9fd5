"""Which tensors autocast may cast, and what it casts them to; over the arguments of an op and over containers.

Eligible means what torch's autocast means by it (ATen/autocast_mode.h, ``is_eligible``): a floating-point tensor on the
region's device that is not float64.
"""

from collections.abc import Iterable, Iterator, Mapping
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
    """Return `value` with every eligible tensor in it cast, through mappings, lists, tuples, sets and iterators."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype is not dtype and is_eligible(value, device_type) else value
    if isinstance(value, Mapping):
        return {
            cast_nested(key, device_type, dtype): cast_nested(item, device_type, dtype) for key, item in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [cast_nested(item, device_type, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Iterator):
        return (cast_nested(item, device_type, dtype) for item in value)
    return value
