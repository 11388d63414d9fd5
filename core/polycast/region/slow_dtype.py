"""Warn once in a process, when a region is made, that its fast dtype is slow on the device."""

import torch

from ..common.interrupts import PLUGIN_ERRORS, raise_if_callers
from ..engine import state
from ..errors import SlowDtypeWarning, warn_user
from ..policy.dtypes import dtype_name
from ..registry.backend import Backend
from ..registry.checks import ask_slow_reason, find_slow_reason
from ..registry.registry import registry
from ..torch_internals.callers_state import call_outside

found: dict[tuple[str, torch.dtype], None] = {}
"""The devices and slow dtypes of the regions so far."""
_checked: set[tuple[str, torch.dtype]] = set()
_is_left_to_summary = False


def warn_if_slow(backend: Backend, dtype: torch.dtype) -> bool:
    """Warn if a dtype is slow on a device, at its first region in this process that has no recipe.

    Returns:
        Whether later regions do not warn.
    """
    key = backend.device_type, dtype
    if key in _checked:
        return True
    override, _ = state.machine.innermost(backend.device_type)
    if override is not None and override.recipe is not None and override.recipe.ops:
        return False
    # Plugins are asked only if the backend says that the dtype is slow: most programs need none.
    text = None if ask_slow_reason(backend, dtype) is None else describe(backend, dtype)
    if text is not None:
        if not _is_left_to_summary:
            ways = [f'recipe="{kind}"{note}' for kind, note in faster_recipes(backend).items()]
            ways += [f"dtype={other}" for other in _faster_dtypes(backend)]
            ways.append("float32, without a region")
            warn_user(
                f"{text}. It saves memory but no time. Faster: {', '.join(ways)}. To silence this: "
                'warnings.simplefilter("ignore", polycast.errors.SlowDtypeWarning).',
                SlowDtypeWarning,
            )
        found[key] = None
    _checked.add(key)
    return True


def leave_to_summary() -> None:
    """Do not warn in this process from now on, but fill :data:`found`."""
    global _is_left_to_summary
    _is_left_to_summary = True


def describe(backend: Backend, dtype: torch.dtype) -> str | None:
    """Return the beginning of a sentence that says why a dtype is slow on a device; None if it is not."""
    reason = find_slow_reason(backend, dtype)
    return None if reason is None else f"{dtype_name(dtype)} is slow on {backend.device_type}: {reason}"


def faster_recipes(backend: Backend) -> dict[str, str]:
    """Return the names of the recipes that avoid slow dtypes on a device, as far as known without compiling C++.

    The values are what messages add to the names.
    """
    from ..policy.recipe import all_recipes  # few programs are warned
    from ..registry.recipe_kernels import check_recipe
    from ..toolchain.load_ops import is_built

    recipes = sorted(
        (each for each in all_recipes() if each.avoids_slow_dtypes is not None), key=lambda each: each.kind
    )
    packages = (name for each in (backend, *registry.extensions(backend.device_type)) for name in each.ops_in_cpp)
    built = all(map(is_built, packages))
    known = [recipe for recipe in recipes if (built or not recipe.needs_kernels) and check_recipe(backend, recipe)]
    return {recipe.kind: recipe.avoids_slow_dtypes or "" for recipe in known}


def _faster_dtypes(backend: Backend) -> list[torch.dtype]:
    try:
        supported = call_outside(backend.supported_dtypes)
    except PLUGIN_ERRORS as error:
        raise_if_callers(error)
        return []
    return [each for each in supported if find_slow_reason(backend, each) is None]
