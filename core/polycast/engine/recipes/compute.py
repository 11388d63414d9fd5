"""Ops that a recipe computes. The kernels at the Autocast keys call `perform` in regions with a recipe."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from ...torch_internals.private_names import is_intercepted
from .. import state
from ..casts.cast_cache import CastCache
from ..casts.not_prepacked import INTERCEPTED
from ..disable_dynamo import disable_dynamo
from ..fastest.choose_way import Way, name_of
from ..fastest.fastest_plan import FastestPlan
from ..inference import in_function
from ..override import Override
from .actions import FALL_BACK, Action, Results
from .calibration import calibrate, calibrators
from .equalized import describe
from .operators import traced
from .plan import NO_KERNEL
from .plans import plan_of
from .recipe_listeners import listeners, notify

IN_FUNCTION = (
    "an autograd.Function computes it, so a backward may follow, and quantized kernels have none: use "
    "torch.inference_mode() for inference"
)

Performed: TypeAlias = tuple[Results | None, Action | None]
"""The results, or None if the op falls back; and the action for like calls, or None if Python decides each time."""


@disable_dynamo
def perform(op: str, device_type: str, args: Sequence[Any], checked: bool = False) -> Performed:
    """Compute an op by the recipe of this thread's region, and notify listeners.

    Called with autocast off for the device.

    Args:
        op: by its name in the dispatcher.
        args: its arguments, in the order of the schema.
        checked: whether the caller has checked the tensors as `Plan._unsupported_tensor` does, that they are of no
            subclass or transform, that nothing intercepts ops, and that autograd records nothing.
    """
    override, cache = state.machine.innermost(device_type)
    plan = None if override is None else plan_of(override, device_type)
    if plan is None:
        return None, None
    if isinstance(plan, FastestPlan):
        return plan.perform(op, args, cache, checked)
    result: torch.Tensor | str
    action: Action | None = None
    if in_function():
        result, action = IN_FUNCTION, FALL_BACK
    elif not checked and is_intercepted():
        result = INTERCEPTED
    elif (calibrated := calibrate(plan, op, args) if calibrators else None) is not None:
        result = calibrated
    else:
        result, action = plan.compute(op, args, cache, checked)
        if result is INTERCEPTED:
            result = traced(op, plan, args, cache)
            if isinstance(result, torch.Tensor):
                return result, None  # the operator notifies listeners when it runs
    if listeners or calibrators:
        action = None  # they are notified of each call
    reason = result if isinstance(result, str) else None
    notify(device_type, plan.recipe.short, op, reason)
    return None if isinstance(result, str) else result, action


class Computed(NamedTuple):
    """Describes how a recipe computes a call, for `explain`.

    Only the recipe "fastest" chooses: the name of a way, the reason, and the dtype that it casts tensors to, which is
    None for a kernel of the backend. For other recipes `way` is empty, `dtype` is None, and `reason` says whether the
    weight is equalized, if the recipe has an equalization.
    """

    way: str = ""
    reason: str = ""
    dtype: torch.dtype | None = None


def how_computed(
    override: Override,
    op: str,
    device_type: str,
    args: Sequence[Any],
    cache: CastCache | None,
    dtype: torch.dtype,
) -> Computed:
    """Return how the recipe computes a call for which it does not fall back, given arguments that may be fake."""
    plan = plan_of(override, device_type)
    if plan is None:
        return Computed()
    if not isinstance(plan, FastestPlan):
        kernel = plan.kernels[op]
        return Computed(reason=describe(plan.recipe, kernel, op, args[kernel.weight]))
    found = plan.plan_call(op, args, cache, dtype)
    if isinstance(found, str):
        return Computed()
    dtypes = {Way.FAST: dtype, Way.FLOAT32: torch.float32}
    return Computed(name_of(found.way, dtype), found.reason, dtypes.get(found.way))


def why_no_kernel(override: Override, op: str, device_type: str) -> str | None:
    """Return why the recipe has no kernel for an op; None if it has one."""
    plan = plan_of(override, device_type)
    return NO_KERNEL if plan is None else plan.why_no_kernel(op)


def why_not(override: Override, op: str, device_type: str, args: Sequence[Any]) -> str | None:
    """Return why a call would fall back, given arguments that may be fake; None if it would not."""
    plan = plan_of(override, device_type)
    return NO_KERNEL if plan is None else plan.why_not(op, args)
