"""A gradient scaler that scales where the fast dtype needs it, and only there."""

from typing import Any

import torch

from ..engine import state
from ..errors import AutocastDisabledWarning, warn_user
from ..plugins.checks import check_availability
from ..plugins.registry import registry
from .autocast import why_disabled

_FLOAT32_SMALLEST = torch.finfo(torch.float32).smallest_normal


def grad_scaler(
    device_type: str, dtype: torch.dtype | None = None, *, enabled: bool = True, **options: Any
) -> torch.amp.GradScaler:
    """Return a torch.amp.GradScaler that is enabled where the dtype of ``autocast(device_type, dtype)`` needs it.

    Small gradients vanish in a dtype whose exponents are fewer than float32's, such as float16, unless the loss is
    scaled. With any other (bfloat16, float32) the scaler passes all through, and one training loop serves every dtype.

    Args:
        device_type: the device to train on.
        dtype: the fast dtype. None: the one that ``autocast(device_type)`` would take.
        enabled: False for a scaler that is off whatever the dtype, as for a region; True where the dtype needs it.
        options: what torch.amp.GradScaler takes besides, such as ``init_scale`` and ``growth_interval``.

    Raises:
        TypeError: `dtype` is not a torch.dtype, `enabled` not a bool, or there is no such option.
        ValueError: `dtype` is not floating point.
        ValueError, RuntimeError: as :func:`polycast.get_backend`.

    Warns:
        AutocastDisabledWarning: the dtype needs scaling, but the region would run disabled: so is the scaler.

    Example:
        >>> import torch, polycast
        >>> polycast.grad_scaler("cpu", torch.float16).is_enabled(), polycast.grad_scaler("cpu").is_enabled()
        (True, False)
    """
    backend = registry.find(device_type)
    if dtype is None:
        dtype = state.current_dtype(backend.device_type, backend.default_dtype)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or None, got {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"the fast dtype must be floating point, got {dtype}")
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled must be a bool, got {enabled!r}")
    needed = enabled and torch.finfo(dtype).smallest_normal > _FLOAT32_SMALLEST
    if needed and (refusal := why_disabled(backend, dtype, check_availability(backend))) is not None:
        warn_user(refusal, AutocastDisabledWarning)
        needed = False
    return torch.amp.GradScaler(backend.device_type, enabled=needed, **options)
