"""The plan of each recipe on each device: made once, and shared by equal recipes."""

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


def plan_for(backend: Backend, recipe: Recipe) -> Plan:
    """Return the plan of a recipe on a backend, which equal recipes share."""
    plan: Plan | None = recipe.derived.get((Plan, backend.device_type))
    if plan is None or plan.backend is not backend:
        plan = recipe.derived[Plan, backend.device_type] = _make(backend, recipe)
    return plan


def _make(backend: Backend, recipe: Recipe) -> Plan:
    return FastestPlan(backend, recipe) if isinstance(recipe, Fastest) else Plan(backend, recipe)
