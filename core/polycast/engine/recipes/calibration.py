"""Calibration, for `equalize`.

While a thread has calibrators, ops that its recipe would compute run in float32, and the calibrators see the arguments.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...common.listeners import Listeners
from ..fastest.in_dtype import in_dtype
from .actions import forget_actions
from .plan import Plan

# No action is kept while there are calibrators: the engine then asks Python for each call.
calibrators: Listeners[Callable[[Plan, str, Sequence[Any]], object]] = Listeners(start=forget_actions)
"""They get the plan, the op and its arguments."""


def calibrate(plan: Plan, op: str, args: Sequence[Any]) -> torch.Tensor | str | None:
    """Show a call to this thread's calibrators.

    Returns:
        Its result in the fast dtype, computed in float32; why the recipe would not compute it; or None if this thread
        has no calibrators.
    """
    here = list(calibrators)
    if not here:
        return None
    reason = plan.unsupported_reason(op, args, by_profile=False)  # batches may have other sizes than the program's
    if reason is not None:
        return reason
    for calibrator in here:
        calibrator(plan, op, args)
    return in_dtype(op, args, torch.float32).to(torch.get_autocast_dtype(plan.device_type))
