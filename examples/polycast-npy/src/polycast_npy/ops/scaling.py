"""The ops of torch.amp.GradScaler, which scales float16 gradients so that small ones do not vanish."""

from collections.abc import Sequence

import numpy as np
import torch

from ..tensors import array


def check_and_unscale_(grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Multiply gradients in place by the inverse of the scale; set `found_inf` to 1 where one is not finite."""
    factor = array(inverse_scale).item()
    for grad in map(array, grads):
        if not np.isfinite(grad).all():
            array(found_inf)[...] = 1
        np.multiply(grad, factor, out=grad)


def update_scale_(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> torch.Tensor:
    """Lower the scale after a step with gradients that are not finite; raise it after `growth_interval` without."""
    value, tracker = array(scale), array(growth_tracker)
    if array(found_inf).item():
        value *= backoff_factor
        tracker[...] = 0
    else:
        tracker += 1
        if tracker.item() == growth_interval:
            grown = value * growth_factor
            value[...] = np.where(np.isfinite(grown), grown, value)
            tracker[...] = 0
    return scale


KERNELS = {
    "_amp_foreach_non_finite_check_and_unscale_": check_and_unscale_,
    "_amp_update_scale_": update_scale_,
}
