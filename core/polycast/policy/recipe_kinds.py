"""The kinds of recipes, and their classes: those that are defined, and those that plugins name."""

import re
from typing import Any

from ..common import generation
from ..errors import warn_user
from . import recipe_settings

kinds: dict[Any, Any] = {}
"""The classes of recipes, by kind."""


def find_kind(name: str) -> Any:
    """Return the class of a kind of recipes, which may be that of a plugin; None if there is none.

    Raises:
        RuntimeError: the plugin that has it is broken, or several have it.
    """
    from .manifests import manifests  # most programs use no recipe

    found = None if name in kinds else manifests().find("recipes", name)  # which imports it
    if found is not None and name not in kinds:
        raise RuntimeError(
            f"A plugin names {found!r} as the recipe {name!r}, whose kind is another. Repair the plugin."
        )
    return kinds.get(name)


def define(cls: Any, kind: object) -> None:
    """Add a class of recipes.

    Raises:
        TypeError, ValueError: it cannot have the kind.
    """
    _check(cls, kind)
    kinds[kind] = cls
    generation.advance()  # a name may have been that of another class


def _check(cls: Any, kind: object) -> None:
    if not isinstance(kind, str) or not re.fullmatch(recipe_settings.NAME, kind):
        raise ValueError(f"{cls.__name__}.kind must be a name such as 'int8', got {kind!r}")
    if cls.ops and not cls.plan_class:
        raise TypeError(f"{cls.__name__} needs a plan_class for its ops, as polycast_plugins.quantize.LowBitRecipe has")
    name = f"{cls.__module__}.{cls.__qualname__}"
    known = kinds.get(kind)
    taken = None if known is None else f"{known.__module__}.{known.__qualname__}"
    if known is None and not name.startswith("polycast."):  # the class of a plugin may not be imported yet
        from .manifests import manifests

        places = [each.plugin.recipes[kind].replace(":", ".") for each in manifests() if kind in each.plugin.recipes]
        taken = name if name in places else next(iter(places), None)
    if taken not in (None, name):
        raise ValueError(f"{cls.__name__}.kind is {kind!r}, which is the kind of {taken}: give it another")


def all_kinds() -> dict[str, Any]:
    """Return the classes of recipes by kind, with those of plugins; warn of those that cannot be used."""
    from .manifests import manifests

    for name in {name for each in manifests() for name in each.plugin.recipes}:
        try:
            find_kind(name)
        except RuntimeError as error:
            warn_user(str(error))
    return kinds
