"""Resolve the arguments of a region to its settings."""

import functools
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from ..engine import state
from ..engine.state import Settings
from ..errors import AutocastDisabledWarning, warn_user
from ..registry.backend import Backend
from ..registry.checks import check_availability, check_dtype
from ..registry.registry import registry
from ..torch_internals.private_names import disable_dynamo
from .slow_dtype import warn_if_slow

if TYPE_CHECKING:
    from ..engine.casts.weight_cache import WeightCache
    from ..policy.recipe import RecipeLike
    from ..policy.value import PolicyLike

_new_tuple = tuple.__new__


@disable_dynamo
def resolve(
    device_type: str,
    dtype: torch.dtype | None,
    enabled: bool,
    cache_enabled: bool | None,
    cache: "WeightCache | None",
    policy: "PolicyLike | None",
    recipe: "RecipeLike | None",
) -> tuple[Settings, bool]:
    """Return the settings of a region, and whether they can be kept for equal arguments; see `StateMachine`.

    Raises and warns as :class:`polycast.autocast` does, which has these arguments.
    """
    try:
        backend = registry.ready[device_type]
    except (KeyError, TypeError):
        backend = _find_backend(device_type)
    name, default = backend.device_type, backend.default_dtype
    is_lasting = policy is None and isinstance(enabled, bool)
    if dtype is None:
        dtype = default
        if state.machine.dtype(name) is not dtype:
            dtype = state.current_dtype(name, dtype)
            is_lasting = is_lasting and dtype is not default and state.machine.nesting(name) > 0
    elif not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or None, got {dtype!r}")
    is_on = bool(enabled)
    if is_on:
        refusal = _why_disabled(backend, dtype)
        if refusal is not None:
            warn_user(refusal, AutocastDisabledWarning)
            is_on = is_lasting = False
    if cache_enabled is not None and not isinstance(cache_enabled, bool):
        raise TypeError(f"cache_enabled must be a bool or None, got {cache_enabled!r}")
    if cache is not None:
        _check_cache(cache, cache_enabled)
    if recipe is None and policy is None:
        if is_on and not warn_if_slow(backend, dtype):
            is_lasting = False
        override = None
    else:
        policies, recipes = _for_overrides()
        usable = recipes.checked_recipe(recipe, backend, is_on, dtype)
        override = policies.override_of(policy, name, usable)
        is_lasting = is_lasting and usable is not None and bool(usable.ops)  # else the next one may warn, too
    # A new tuple is cheaper than a call of the class.
    settings = _new_tuple(Settings, (name, is_on, dtype, cache_enabled, override, cache, False))
    return settings, is_lasting


@functools.cache  # the statement takes longer than the rest of a region
def _for_overrides() -> tuple[ModuleType, ModuleType]:
    from . import policies, recipes  # most regions have neither

    return policies, recipes


def _find_backend(device_type: object) -> Backend:
    if callable(device_type):
        raise ValueError(
            f"Expected `device_type` of type `str`, got: {device_type!r}. As a decorator, autocast is called with the "
            'device, as in @polycast.autocast("cpu")'
        )
    return registry.find(device_type)


def _why_disabled(backend: Backend, dtype: torch.dtype) -> str | None:
    """Return why a region of a backend with a fast dtype runs disabled, as warnings say it; None if it does not."""
    answer = check_availability(backend)
    if not answer.available:
        return f"{backend.device_type} is not available: {answer.reason}. Disabling autocast."
    if dtype is not backend.default_dtype:
        answer = check_dtype(backend, dtype)
        if not answer.available:
            return (
                f"In {backend.device_type.upper()} autocast, but the target dtype is not supported. "
                f"Disabling autocast.\n{dtype} was asked for: {answer.reason}."
            )
    return None


def _check_cache(cache: object, cache_enabled: bool | None) -> None:
    from ..engine.casts.weight_cache import WeightCache

    if not isinstance(cache, WeightCache):
        raise TypeError(f"cache must be a polycast.WeightCache or None, got {cache!r}")
    if cache_enabled is False:
        raise ValueError("cache= asks to keep casts and cache_enabled=False not to: leave out one of the two")
