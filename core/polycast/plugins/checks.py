"""Ask a backend what it supports. An exception that it raises means that it does not."""

import torch

from ..policy.recipe import Recipe
from .backend import Availability, Backend

PLUGIN_ERRORS = (Exception, SystemExit)  # some libraries exit if they find no device


def check_availability(backend: Backend) -> Availability:
    """Return whether the device can be used."""
    try:
        answer = backend.availability()
    except PLUGIN_ERRORS as error:
        return _unavailable(error)
    return answer if isinstance(answer, Availability) else _invalid("availability", answer)


def check_dtype(backend: Backend, dtype: torch.dtype) -> Availability:
    """Return whether the device supports a fast dtype."""
    try:
        answer = backend.dtype_availability(dtype)
    except PLUGIN_ERRORS as error:
        return _unavailable(error)
    return answer if isinstance(answer, Availability) else _invalid("dtype_availability", answer)


def check_recipe(backend: Backend, recipe: Recipe) -> Availability:
    """Return whether the device supports a recipe."""
    try:
        answer = backend.recipe_availability(recipe)
    except PLUGIN_ERRORS as error:
        return _unavailable(error)
    return answer if isinstance(answer, Availability) else _invalid("recipe_availability", answer)


def ask_slow_reason(backend: Backend, dtype: torch.dtype) -> str | None:
    """Return why a fast dtype is slow on the device; None if it is not, or the backend raises."""
    try:
        reason: object = backend.slow_reason(dtype)
    except PLUGIN_ERRORS:
        return None
    return reason if isinstance(reason, str) and reason else None


def _unavailable(error: BaseException) -> Availability:
    return Availability(False, str(error) or type(error).__name__)


def _invalid(method: str, answer: object) -> Availability:
    return Availability(False, f"{method}() returned {answer!r}, expected a polycast.Availability")
