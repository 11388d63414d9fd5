"""A gradient scaler that scales only if the fast dtype needs it."""

from typing import Any

import torch
from torch import nn

from ..engine import state
from ..errors import AutocastDisabledWarning, warn_user
from ..registry.checks import check_availability
from ..registry.registry import registry
from .recording_scaler import RecordingGradScaler
from .resolve import why_disabled

_FLOAT32_SMALLEST = torch.finfo(torch.float32).smallest_normal


def grad_scaler(
    device_type: str,
    dtype: torch.dtype | None = None,
    *,
    enabled: bool = True,
    model: nn.Module | None = None,
    **options: Any,
) -> RecordingGradScaler:
    """Return a torch.amp.GradScaler that is enabled if the dtype of ``autocast(device_type, dtype)`` needs it.

    Small gradients underflow in a dtype with a smaller exponent range than float32, such as float16, unless the loss is
    scaled. For other dtypes (bfloat16, float32) the scaler does nothing, so one training loop serves every dtype.

    The scaler's ``history`` has the scale and the skipped steps, with the parameters whose gradients were not finite.

    Args:
        device_type: the device to train on.
        dtype: the fast dtype. None: that of ``autocast(device_type)``.
        enabled: False for a scaler that is off with every dtype.
        model: the model that names the parameters in the history, held weakly. None: they have the names of an
            optimizer made from ``model.named_parameters()``, or their position.
        options: other arguments of torch.amp.GradScaler, such as ``init_scale`` and ``growth_interval``.

    Raises:
        TypeError: `dtype` is not a torch.dtype, `enabled` not a bool, `model` not a module, or an option does not
            exist.
        ValueError: `dtype` is not floating point.
        ValueError, RuntimeError: as :func:`polycast.plugin.get_backend`.

    Warns:
        AutocastDisabledWarning: the region would run disabled, so the scaler is disabled, too.

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
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or None, got {model!r:.100}")
    needed = enabled and torch.finfo(dtype).smallest_normal > _FLOAT32_SMALLEST
    if needed and (refusal := why_disabled(backend, dtype, check_availability(backend))) is not None:
        warn_user(refusal, AutocastDisabledWarning)
        needed = False
    return RecordingGradScaler(backend.device_type, enabled=needed, model=model, **options)
