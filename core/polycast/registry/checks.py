"""Ask a backend or an extension what it supports. An exception that it raises means that it does not.

An affirmative answer is kept for a generation, as torch asks once for a driver; after any other, it is asked again.
"""

from typing import TYPE_CHECKING

import torch

from ..common import generation
from ..errors import PLUGIN_ERRORS, raise_if_callers
from ..torch_internals.callers_state import call_outside
from .backend import Availability, Backend, Extension

if TYPE_CHECKING:
    from ..policy.recipe import Recipe

_MAX_ANSWERS = 256
_affirmative: dict[tuple[object, ...], tuple[Extension, Availability]] = {}
"""By generation, id of a backend or extension, method and arguments: the backend or extension, and its answer."""


def check_availability(given: Extension) -> Availability:
    """Return whether the device of a backend, or an extension, can be used."""
    return _answer(given, "availability")


def check_dtype(backend: Backend, dtype: torch.dtype) -> Availability:
    """Return whether the device supports a fast dtype."""
    return _answer(backend, "dtype_availability", dtype)


def ask_recipe(given: Extension, recipe: "Recipe") -> Availability:
    """Return whether a backend or an extension has kernels for a recipe."""
    return _answer(given, "recipe_availability", recipe)


def ask_slow_reason(backend: Backend, dtype: torch.dtype) -> str | None:
    """Return why a fast dtype is slow on the device; None if it is not, or the backend raises."""
    try:
        reason: object = call_outside(backend.slow_reason, dtype)
    except PLUGIN_ERRORS as error:
        raise_if_callers(error)
        return None
    return reason if isinstance(reason, str) and reason else None


def _answer(given: Extension, method: str, *arguments: object) -> Availability:
    key = generation.number, id(given), method, *arguments
    kept = _affirmative.get(key)
    if kept is not None:
        return kept[1]
    try:
        answer: object = call_outside(getattr(given, method), *arguments)
    except PLUGIN_ERRORS as error:
        raise_if_callers(error)
        return Availability(False, str(error) or type(error).__name__)
    if isinstance(answer, Availability):
        if answer.available:
            if len(_affirmative) >= _MAX_ANSWERS:
                _affirmative.clear()
            _affirmative[key] = given, answer
        return answer
    return Availability(False, f"{method}() returned {answer!r}, expected a polycast.plugin.Availability")
