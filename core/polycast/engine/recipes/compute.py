"""Ops that a recipe computes. The kernels at the Autocast keys call `perform` in regions with a recipe."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ...common import generation
from ...policy.recipe import Recipe
from ...registry.registry import registry
from .. import state
from ..disable_dynamo import disable_dynamo
from ..override import Override
from .plan import Performed, Plan


@disable_dynamo
def perform(op: str, device_type: str, args: Sequence[Any], checked: bool = False) -> Performed:
    """Compute an op by the recipe of this thread's region; see :meth:`.Plan.perform`.

    Called with autocast off for the device.
    """
    override, cache = state.machine.innermost(device_type)
    plan = None if override is None else plan_of(override, device_type)
    return (None, None) if plan is None else plan.perform(op, args, cache, checked)


def plan_of(override: Override, device_type: str) -> Plan | None:
    """Return the plan of an override's recipe on a device; None if it has none."""
    backend = registry.find(device_type)
    plan: Plan | None = override.plan
    if plan is None or plan.backend is not backend or plan.generation != generation.number:
        if override.recipe is None:
            return None
        plan = override.plan = Plan.of(backend, override.recipe)
    return plan


def resolved(recipe: Recipe, device_type: str, measure: bool) -> Recipe:
    """Return what the recipe's method of this name does, or did before in this generation."""
    return _resolved(generation.number, torch.get_num_threads(), recipe, device_type, measure)


@functools.lru_cache(maxsize=64)
def _resolved(generation: int, threads: int, recipe: Recipe, device_type: str, measure: bool) -> Recipe:
    return recipe.resolved(device_type, measure)
