"""Ops that a recipe computes: what the kernels at the Autocast keys call where a region has one.

`perform` has the op computed by the backend's kernel for it, or says to those who count why it runs in the fast dtype.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ...torch_internals.names import are_functorch_transforms_active, is_forward_ad_active, is_tracing
from .. import state
from ..casts.not_prepacked import INTERCEPTED, NO_WEIGHT
from ..casts.weights import parameter_of
from ..disable_dynamo import disable_dynamo
from ..inference import in_function
from ..override import Override
from .listeners import notify
from .operators import traced
from .plan import NO_KERNEL, plan_of

IN_FUNCTION = "an autograd.Function computes it, and low bit is for inference (what torch.inference_mode() says)"


@disable_dynamo
def perform(op: str, device_type: str, args: Sequence[Any], plain: bool = False) -> torch.Tensor | None:
    """Compute an op by the recipe of this thread's region; None where it is to run in the fast dtype.

    Called by kernels at the Autocast key, outside of autocast for the device.

    Args:
        op: by its name in the dispatcher.
        args: all that the op takes, in the order of its schema.
        plain: whether it is known already that the tensors are such as :meth:`Plan.unsupported_reason` looks for, that
            nothing watches the ops, and that autograd has nothing to record.
    """
    region = state.machine.innermost(device_type)
    if region is None or region[0] is None:
        return None
    cache = region[1]
    plan = plan_of(region[0], device_type)
    if plan is None:
        return None
    result: torch.Tensor | str
    if in_function():
        result = IN_FUNCTION
    elif not plain and (is_forward_ad_active() or are_functorch_transforms_active() or is_tracing()):
        result = INTERCEPTED
    else:
        result = plan.compute(op, args, cache, plain)
        if result is INTERCEPTED:
            result = traced(op, plan, args, cache)
            if isinstance(result, torch.Tensor):
                return result  # the operator tells of itself, where it runs
    if isinstance(result, torch.Tensor):
        notify(device_type, plan.recipe, op, None)
        return result
    notify(device_type, plan.recipe, op, result)
    return None


def why_no_kernel(override: Override, op: str, device_type: str) -> str | None:
    """Say why no call of an op would be computed by the recipe: there is no kernel; None: there is one."""
    plan = plan_of(override, device_type)
    return NO_KERNEL if plan is None else None if op in plan.kernels else plan.refusal


def why_not(override: Override, op: str, device_type: str, args: Sequence[Any]) -> str | None:
    """Say why a call would not be computed by the recipe, of arguments that may be fake; None: it would be."""
    plan = plan_of(override, device_type)
    if plan is None or op not in plan.kernels:
        return why_no_kernel(override, op, device_type)
    weight = args[plan.kernels[op].weight]
    if isinstance(weight, torch.Tensor) and not weight.is_meta and parameter_of(weight) is None:
        return NO_WEIGHT
    return plan.unsupported_reason(op, args)
