"""Check a recipe against the device of a region."""

from collections.abc import Sequence

import torch

from polycast_plugins.fastest import profile

from ..common import env
from ..engine.state import DictItem
from ..errors import RecipeDisabledWarning, warn_user
from ..policy.recipe import NoRecipe, Recipe, RecipeLike, read_recipe
from ..registry.backend import Availability, Backend
from ..registry.recipe_kernels import check_recipe
from .slow_dtype import warn_if_slow

_warned: set[tuple[str, str]] = set()


def profile_dependencies() -> Sequence[DictItem]:
    """Return the dict items that must be unchanged for `profile.usable_recipes` to be valid.

    The table itself is one, since `profile.forget` replaces it. The number of threads is part of its keys.
    """
    return (vars(profile), "usable_recipes", profile.usable_recipes), *env.profile_items()


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
    key = given, backend, enabled, torch.get_num_threads(), env.profile()
    kept = profile.usable_recipes
    found = kept.get(key) if isinstance(given, (str, Recipe)) else None
    if found is not None:
        return found
    recipe = asked = read_recipe(given)
    if not recipe.ops:
        return recipe
    answer = check_recipe(backend, recipe) if enabled else Availability(True)
    if answer.available:
        try:
            recipe = recipe.resolved(backend.device_type, measure=enabled)
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
    if recipe is not asked and asked.resolves_alike:
        kept[key] = recipe
    return recipe
