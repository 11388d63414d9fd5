"""Ask a backend or an extension what it supports. An exception that it raises means that it does not.

An affirmative answer is kept for a generation, as torch asks once for a driver; after any other, it is asked again.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..common import generation
from ..errors import PLUGIN_ERRORS, raise_if_callers
from ..torch_internals.callers_state import call_outside
from .backend import Availability, Extension

if TYPE_CHECKING:
    from ..policy.recipe import Recipe

_MAX_ANSWERS = 256
_affirmative: dict[tuple[object, ...], tuple[Extension, Availability]] = {}
"""By generation, id of a backend or extension, and what was asked for: the backend or extension, and its answer."""


def ask(given: Extension, wanted: "torch.dtype | Recipe | None" = None) -> Availability:
    """Return whether the device of a backend, or an extension, can be used.

    Args:
        given: the backend or the extension.
        wanted: ask instead whether the device supports a fast dtype, or whether there are kernels for a recipe.
    """
    key = generation.number, id(given), wanted
    kept = _affirmative.get(key)
    if kept is not None:
        return kept[1]
    about = "dtype_availability" if isinstance(wanted, torch.dtype) else "recipe_availability"
    method, arguments = ("availability", ()) if wanted is None else (about, (wanted,))
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


def answer(method: Callable[..., object], *arguments: object) -> Any:
    """Return what a method of a backend returns; None if it raises."""
    try:
        return call_outside(method, *arguments)
    except PLUGIN_ERRORS as error:
        raise_if_callers(error)
        return None
