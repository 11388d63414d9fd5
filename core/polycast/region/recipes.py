"""Check a recipe against the device of a region."""

from ..errors import RecipeDisabledWarning, warn_user
from ..plugins.backend import Backend
from ..plugins.checks import check_recipe
from ..policy.recipe import NoRecipe, Recipe, RecipeLike, read_recipe

_warned: set[tuple[str, str]] = set()


def usable_recipe(given: RecipeLike, backend: Backend, enabled: bool) -> Recipe:
    """Return the recipe of a region; if its device does not support that, warn and return none.

    Raises:
        TypeError, ValueError: `given` is not a recipe.
    """
    recipe = read_recipe(given)
    if not enabled or isinstance(recipe, NoRecipe):
        return recipe
    answer = check_recipe(backend, recipe)
    if not answer.available:
        warn_user(
            f"{recipe!r} cannot be used on {backend.device_type}: {answer.reason}. The region runs in the fast dtype.",
            RecipeDisabledWarning,
        )
        return NoRecipe()
    if answer.reason and (backend.device_type, answer.reason) not in _warned:
        _warned.add((backend.device_type, answer.reason))
        warn_user(f"{recipe!r} on {backend.device_type}: {answer.reason}")
    return recipe
