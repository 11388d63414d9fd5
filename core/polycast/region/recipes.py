"""Check a recipe against the device of a region."""

import torch

from ..errors import RecipeDisabledWarning, warn_user
from ..policy.recipe import NoRecipe, Recipe, RecipeLike, read_recipe
from ..registry.backend import Availability, Backend
from ..registry.recipe_kernels import check_recipe
from .slow_dtype import warn_if_slow

_warned: set[tuple[str, str]] = set()


def checked_recipe(given: RecipeLike | None, backend: Backend, enabled: bool, dtype: torch.dtype) -> Recipe | None:
    """Return what `usable_recipe` does, or None if no recipe is given; warn if the region runs in a slow dtype."""
    recipe = None if given is None else usable_recipe(given, backend, enabled)
    if enabled and (recipe is None or not recipe.ops):
        warn_if_slow(backend, dtype)
    return recipe


def usable_recipe(given: RecipeLike, backend: Backend, enabled: bool) -> Recipe:
    """Return the recipe to use in a region. If its device does not support the given one, warn and return NoRecipe().

    It is resolved, which may measure the device; see :meth:`polycast.plugin.Recipe.resolved`.

    Raises:
        TypeError, ValueError: `given` is not a recipe, or cannot be resolved.
    """
    recipe = read_recipe(given)
    if not recipe.ops:
        return recipe
    from ..engine.recipes.plan import resolved  # most programs use no recipe

    answer = check_recipe(backend, recipe) if enabled else Availability(True)
    if answer.available:
        try:
            recipe = resolved(recipe, backend.device_type, measure=enabled)
        except RuntimeError as error:
            answer = Availability(False, str(error))
    if not answer.available:
        reason = answer.reason.rstrip(".")
        warn_user(
            f"{recipe!r} cannot be used on {backend.device_type}: {reason}. The region runs in the fast dtype.",
            RecipeDisabledWarning,
        )
        return NoRecipe()
    if answer.reason and (backend.device_type, answer.reason) not in _warned:
        _warned.add((backend.device_type, answer.reason))
        warn_user(f"{recipe!r} on {backend.device_type}: {answer.reason}")
    return recipe
