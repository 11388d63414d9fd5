"""Ops that a recipe computes. The kernels at the Autocast keys call `perform` in regions with a recipe."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from ...torch_internals.names import are_functorch_transforms_active, is_forward_ad_active, is_tracing
from .. import state
from ..casts.not_prepacked import INTERCEPTED, NO_WEIGHT
from ..casts.weights import parameter_of
from ..disable_dynamo import disable_dynamo
from ..inference import in_function
from ..override import Override
from .actions import Action
from .listeners import listeners, notify
from .operators import traced
from .plan import NO_KERNEL, plan_of

IN_FUNCTION = "an autograd.Function computes it, and low bit is for inference (what torch.inference_mode() says)"

Performed: TypeAlias = tuple[torch.Tensor | None, Action | None]
"""The result of an op, None if it falls back; and how to compute like calls, None if Python decides each time."""


@disable_dynamo
def perform(op: str, device_type: str, args: Sequence[Any], plain: bool = False) -> Performed:
    """Compute an op by the recipe of this thread's region, and notify listeners.

    Called with autocast off for the device.

    Args:
        op: by its name in the dispatcher.
        args: its arguments, in the order of the schema.
        plain: whether the caller has checked the tensors, that nothing intercepts ops, and that autograd does not
            record them.
    """
    region = state.machine.innermost(device_type)
    if region is None or region[0] is None:
        return None, None
    cache = region[1]
    plan = plan_of(region[0], device_type)
    if plan is None:
        return None, None
    result: torch.Tensor | str
    action: Action | None = None
    if in_function():
        result = IN_FUNCTION
    elif not plain and (is_forward_ad_active() or are_functorch_transforms_active() or is_tracing()):
        result = INTERCEPTED
    else:
        result, action = plan.compute(op, args, cache, plain)
        if result is INTERCEPTED:
            result = traced(op, plan, args, cache)
            if isinstance(result, torch.Tensor):
                return result, None  # the operator notifies listeners when it runs
    if listeners:
        action = None  # they are notified of each call
    reason = result if isinstance(result, str) else None
    notify(device_type, plan.recipe, op, reason)
    return None if isinstance(result, str) else result, action


def why_no_kernel(override: Override, op: str, device_type: str) -> str | None:
    """Return why the recipe has no kernel for an op; None if it has one."""
    plan = plan_of(override, device_type)
    return NO_KERNEL if plan is None else None if op in plan.kernels else plan.refusal


def why_not(override: Override, op: str, device_type: str, args: Sequence[Any]) -> str | None:
    """Return why a call would fall back, given arguments that may be fake; None if it would not."""
    plan = plan_of(override, device_type)
    if plan is None or op not in plan.kernels:
        return why_no_kernel(override, op, device_type)
    weight = args[plan.kernels[op].weight]
    if isinstance(weight, torch.Tensor) and not weight.is_meta and parameter_of(weight) is None:
        return NO_WEIGHT
    return plan.unsupported_reason(op, args)
