"""Resolve the arguments of a region to its settings; enter it, with what it needs installed, and leave it.

The memos and late imports keep a region cheap: most have neither a policy nor a recipe.
"""

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..common.announce import log
from ..compilers.export import record_entry, record_exit
from ..engine import state
from ..engine.choice import reference_note
from ..engine.installation import install_for
from ..engine.override import REGIONS_POLICY, Override, make_override
from ..engine.state import Settings
from ..errors import AutocastDisabledWarning, RecipeDisabledWarning, warn_user
from ..registry.backend import Availability, Backend
from ..registry.checks import ask
from ..registry.registry import AUTO, registry
from ..torch_internals import changes
from ..torch_internals.private_names import disable_dynamo
from .slow_dtype import warn_if_slow

if TYPE_CHECKING:
    from ..engine.casts.weight_cache import WeightCache
    from ..policy.op_policies import OpPolicies
    from ..policy.recipe import Recipe, RecipeLike
    from ..policy.value import Policy, PolicyLike

_new_tuple = tuple.__new__
_MAX_POLICIES = 256
_policies: "dict[tuple[Any, ...], Policy]" = {}
"""By the items of mappings, and the path and status of files, the policies that were last read from them."""
_said: set[tuple[str, str]] = set()


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
    is_lasting = policy is None and isinstance(enabled, bool) and device_type != AUTO
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
            _once(name, refusal, log.info, "%s: regions are disabled: %s", name, refusal)
            warn_user(refusal, AutocastDisabledWarning)
            is_on = is_lasting = False
    if cache_enabled is not None and not isinstance(cache_enabled, bool):
        raise TypeError(f"cache_enabled must be a bool or None, got {cache_enabled!r}")
    if cache is not None:
        _check_cache(cache, cache_enabled)
    usable = None if recipe is None else usable_recipe(recipe, backend, is_on)
    has_recipe = usable is not None and bool(usable.ops)
    is_plain = not has_recipe and recipe in (None, "none", usable)  # another recipe was refused with a warning
    warns_no_more = not is_plain or not is_on or warn_if_slow(backend, dtype)
    is_lasting = is_lasting and warns_no_more and (recipe is None or has_recipe)
    override = None if policy is None and usable is None else override_of(policy, name, usable)
    # A new tuple is cheaper than a call of the class.
    settings = _new_tuple(Settings, (name, is_on, dtype, cache_enabled, override, cache, False))
    return settings, is_lasting


def prepare(settings: Settings) -> None:
    """Install what a region needs that has just been entered."""
    install_for(settings)
    if settings.has_more_than_torch and not changes.overrides_are_guarded():
        from ..compilers import guards  # most regions have neither an override nor a cache

        guards.keep_eager()


def enter(owner: object, settings: Settings, recorded: Settings | None = None) -> None:
    """Enter a region on this thread, with its kernels installed; torch.export records it, or another in its place."""
    in_function_mode = state.machine.enter(owner, settings)
    try:
        if settings.ready_key not in state.ready:
            prepare(settings)
        if in_function_mode:
            record_entry(settings if recorded is None else recorded)
    except BaseException:
        state.machine.leave(owner)
        raise


def leave(owner: object) -> bool:
    """Leave a region on this thread, and return whether the thread was in it."""
    in_function_mode = state.machine.leave(owner)
    if in_function_mode:
        record_exit()
    return in_function_mode is not None


def _find_backend(device_type: object) -> Backend:
    if callable(device_type):
        raise ValueError(
            f"Expected `device_type` of type `str`, got: {device_type!r}. As a decorator, autocast is called with the "
            'device, as in @polycast.autocast("cpu")'
        )
    return registry.find(device_type)


def _why_disabled(backend: Backend, dtype: torch.dtype) -> str | None:
    """Return why a region of a backend with a fast dtype runs disabled, as warnings say it; None if it does not."""
    answer = ask(backend)
    if not answer.available:
        return f"{backend.device_type} is not available: {answer.reason}. Disabling autocast."
    if answer.reason:
        _once(backend.device_type, answer.reason, warn_user, f"{backend.device_type}: {answer.reason}.")
    if dtype is not backend.default_dtype:
        answer = ask(backend, dtype)
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


def usable_recipe(given: "RecipeLike", backend: Backend, enabled: bool) -> "Recipe":
    """Return the recipe to use in a region. If its device does not support the given one, warn and return NoRecipe().

    It is resolved, which may measure the device; see :meth:`polycast.plugin.Recipe.resolved`.

    Raises:
        TypeError, ValueError: `given` is not a recipe, or cannot be resolved.
    """
    from ..policy.recipe import NoRecipe, read_recipe

    recipe = read_recipe(given)
    if not recipe.ops:
        return recipe
    from ..engine.recipes.plan import resolved
    from ..registry.recipe_kernels import check_recipe

    device, answer = backend.device_type, check_recipe(backend, recipe) if enabled else Availability(True)
    if answer.available:
        try:
            recipe = resolved(recipe, device, measure=enabled)
        except RuntimeError as error:
            answer = Availability(False, str(error))
    if not answer.available:
        kind, reason = recipe.kind, answer.reason.rstrip(".")
        _once(device, kind + reason, log.info, "%s: regions run without the recipe %s: %s", device, kind, reason)
        how = f"in the fast dtype{reference_note(reason)}"
        warn_user(f"{recipe!r} cannot be used on {device}: {reason}. The region runs {how}.", RecipeDisabledWarning)
        return NoRecipe()
    if answer.reason:
        _once(device, answer.reason, warn_user, f"{recipe!r} on {device}: {answer.reason}")
    return recipe


def _once(device_type: str, reason: str, say: Callable[..., None], *text: str) -> None:
    if (device_type, reason) not in _said:
        _said.add((device_type, reason))
        say(*text)


@functools.cache  # the statement takes longer than the rest of a region
def _policy_class() -> "type[Policy]":
    from ..policy.value import Policy

    return Policy


def override_of(policy: "PolicyLike | None", device_type: str, recipe: "Recipe | None" = None) -> Override | None:
    """Return the override of a region for a device; None if there is no policy for its ops and no recipe.

    Raises:
        ValueError: the policy has rules for modules.
        OSError, ValueError: as :meth:`polycast.Policy.of`.
    """
    if policy is None:
        return None if recipe is None else make_override(device_type, frozenset(), REGIONS_POLICY, "", recipe, None)
    if not isinstance(policy, _policy_class()):
        policy = _read(policy)
    if policy.has_module_rules:
        raise ValueError(
            "policy= has rules for modules, and a region does not see which module calls an op: put the model "
            "under the policy with polycast.apply_policy(model, policy), and leave policy= out."
        )
    part = policy.for_device(device_type)
    return override_of_ops(device_type, part.ops, REGIONS_POLICY, part.name, recipe)


def override_of_ops(
    device_type: str, ops: "OpPolicies", rule: str, name: str, recipe: "Recipe | None"
) -> Override | None:
    """Return the override with these policies, of a kind of rule and its name; None without policies and recipe."""
    items = ops.resolved_items
    return make_override(device_type, items, rule, name, recipe, None) if items or recipe is not None else None


def _read(given: Any) -> "Policy":
    """Return a policy that is given as a mapping or a path; the same one while it says the same."""
    is_file = isinstance(given, (str, os.PathLike))
    try:
        if is_file:
            status = os.stat(given)
            # A copy that keeps the time of its source, such as that of rsync, may be written with the old one's.
            times = status.st_mtime_ns, status.st_ctime_ns
            key: tuple[Any, ...] = (os.path.abspath(given), *times, status.st_size, status.st_ino)
        else:
            key = tuple(given.items())
        found = _policies.get(key)
    except (AttributeError, FileNotFoundError, TypeError):  # not a mapping, no file, or a value without a hash
        return _policy_class().of(given)
    if found is None:
        found = _policy_class().of(given)
        # OpPolicies of other libraries may be defined again, with other overloads.
        if is_file or all(name.startswith("aten::") for name in found.ops.resolved):
            if len(_policies) >= _MAX_POLICIES:
                _policies.clear()
            _policies[key] = found
    return found
