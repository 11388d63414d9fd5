"""Ask a backend what it supports. An exception that it raises is an answer: it does not."""

from collections.abc import Callable

import torch

from ..policy.recipe import Recipe
from .backend import Availability, Backend

PLUGIN_ERRORS = (Exception, SystemExit)  # some libraries exit if they find no device


def check_availability(backend: Backend) -> Availability:
    """Return whether the device can be used."""
    return _ask("availability", backend.availability)


def check_dtype(backend: Backend, dtype: torch.dtype) -> Availability:
    """Return whether the device supports a fast dtype."""
    return _ask("dtype_availability", lambda: backend.dtype_availability(dtype))


def check_recipe(backend: Backend, recipe: Recipe) -> Availability:
    """Return whether the device supports a recipe."""
    return _ask("recipe_availability", lambda: backend.recipe_availability(recipe))


def _ask(method: str, call: Callable[[], Availability]) -> Availability:
    try:
        answer = call()
    except PLUGIN_ERRORS as error:
        return Availability(False, str(error) or type(error).__name__)
    if isinstance(answer, Availability):
        return answer
    return Availability(False, f"{method}() returned {answer!r}, expected a polycast.Availability")
