"""The plan of each recipe on each device: made once, and shared by equal recipes."""

import functools

from ...plugins.backend import Backend
from ...plugins.registry import registry
from ...policy.recipe import Fastest, Recipe
from ..fastest.fastest_plan import FastestPlan
from ..override import Override
from .plan import Plan


def plan_of(override: Override, device_type: str) -> Plan | None:
    """Return the plan of an override's recipe on a device; None if it has none."""
    backend = registry.find(device_type)
    plan: Plan | None = override.plan
    if plan is None or plan.backend is not backend:
        if override.recipe is None:
            return None
        plan = override.plan = plan_for(backend, override.recipe)
    return plan


@functools.lru_cache(maxsize=64)
def plan_for(backend: Backend, recipe: Recipe) -> Plan:
    """Return the plan of a recipe on a backend, which equal recipes share."""
    return FastestPlan(backend, recipe) if isinstance(recipe, Fastest) else Plan(backend, recipe)
