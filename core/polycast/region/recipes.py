"""What becomes of the recipe that a region is given, on a device that may not have it."""

from ..engine.installation import taken_back
from ..engine.low_bit.plan import packings
from ..errors import RecipeDisabledWarning, warn_user
from ..plugins.backend import Backend
from ..plugins.discovery import check_recipe
from ..policy.recipe import NoRecipe, Recipe, RecipeLike, read_recipe
from . import fused_attention  # noqa: F401  # is in place wherever a recipe is

_told: set[tuple[str, str]] = set()
taken_back.append(packings.drop)


def usable_recipe(given: RecipeLike, backend: Backend, enabled: bool) -> Recipe:
    """Return the recipe of a region on a device: none where the device cannot compute by it, with a warning.

    Raises:
        TypeError, ValueError: it is no recipe.
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
    if answer.reason and (backend.device_type, answer.reason) not in _told:
        _told.add((backend.device_type, answer.reason))
        warn_user(f"{recipe!r} on {backend.device_type}: {answer.reason}")
    return recipe
