"""Which tensors autocast may cast, and what it casts them to; over the arguments of an op.

Eligible means what torch's autocast means by it (ATen/autocast_mode.h, ``is_eligible``): a floating-point tensor on the
region's device that is not float64.
"""

from collections.abc import Iterable, Iterator

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
