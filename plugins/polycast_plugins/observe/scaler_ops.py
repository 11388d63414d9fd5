"""The two ops of torch.amp.GradScaler, for devices that have no kernels of them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from polycast.plugin import torch_name


def check_and_unscale(grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """Multiply gradients in place by the inverse of the scale; set `found_inf` to 1 if one of them is not finite."""
    if grads and not all(torch.stack([torch.isfinite(grad).all() for grad in grads]).tolist()):
        found_inf.fill_(1.0)
    for grad in grads:
        grad.mul_(inverse)


def update_scale(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> torch.Tensor:
    """Lower the scale after a step that is skipped; raise it after `growth_interval` steps that are not."""
    if found_inf.item():
        scale.mul_(backoff_factor)
        growth_tracker.zero_()
    elif growth_tracker.item() + 1 == growth_interval:
        grown = scale * growth_factor
        if torch.isfinite(grown).item():
            scale.copy_(grown)
        growth_tracker.zero_()
    else:
        growth_tracker.add_(1)
    return scale


_LOST = "gradients cannot be scaled on devices that lack the ops of torch's scaler"
_check_and_unscale = torch_name("torch._amp_foreach_non_finite_check_and_unscale_", check_and_unscale, _LOST)
_update_scale = torch_name("torch._amp_update_scale_", update_scale, _LOST)
_IN_PYTHON: Mapping[Any, Callable[..., Any]] = {_check_and_unscale: check_and_unscale, _update_scale: update_scale}


class _InPython(TorchFunctionMode):
    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _IN_PYTHON.get(func, func)(*args, **(kwargs or {}))


@functools.cache
def _has_kernels(device_type: str) -> bool:
    one = torch.ones((), device=device_type)
    try:
        _check_and_unscale([one.clone()], one - 1, one)
        _update_scale(one.clone(), torch.zeros((), dtype=torch.int32, device=device_type), one, 2.0, 0.5, 1)
    except NotImplementedError:
        return False
    return True


def with_scaler_ops(device_type: str) -> AbstractContextManager[object]:
    """Return a context manager in which the ops run in Python, if the device has no kernels of them."""
    return nullcontext() if _has_kernels(device_type) else _InPython()
