"""Warn once in a process, when a region is made, that its fast dtype is slow on the device."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..common.events import events
from ..engine import state
from ..errors import SlowDtypeWarning, warn_user
from ..registry.backend import Backend
from ..registry.checks import answer
from ..registry.registry import registry

_checked: set[tuple[str, torch.dtype]] = set()


@dataclass(frozen=True)
class SlowDtype:
    """A fast dtype that is slow on a device.

    Attributes:
        backend: the backend of the device.
        dtype: the dtype.
        reason: why it is slow, as the end of a sentence.
    """

    backend: Backend
    dtype: torch.dtype
    reason: str

    def __str__(self) -> str:
        """Return the beginning of a sentence that says why the dtype is slow."""
        from ..policy.names import dtype_name  # few programs are warned

        return f"{dtype_name(self.dtype)} is slow on {self.backend.device_type}: {self.reason}"

    def faster_recipes(self) -> Mapping[str, str]:
        """Return the names of the recipes that avoid slow dtypes on the device, as far as known without compiling C++.

        The values are what messages add to the names.
        """
        from ..policy.recipe import all_recipes  # few programs are warned
        from ..registry.recipe_kernels import check_recipe
        from ..toolchain.load import BuildableLibrary

        backend, recipes = self.backend, [each for each in all_recipes() if each.avoids_slow_dtypes is not None]
        packages = (name for each in (backend, *registry.extensions(backend.device_type)) for name in each.ops_in_cpp)
        built = all(BuildableLibrary.of_ops(package).is_built() for package in packages)
        recipes = [each for each in recipes if (built or not each.needs_kernels) and check_recipe(backend, each)]
        return {each.kind: each.avoids_slow_dtypes or "" for each in sorted(recipes, key=lambda each: each.kind)}


def find_slow_dtype(backend: Backend, dtype: torch.dtype) -> SlowDtype | None:
    """Return why a fast dtype is slow on a device, and which recipes are faster; None if it is not slow.

    The backend says so (`Backend.slow_reason`), or a plugin that knows better (`Plugin.slow_reasons`).
    """
    from ..policy import manifests

    reason = _reason(backend, dtype)
    for plugin in manifests.functions("slow_reasons"):
        reason = plugin.ask(backend.device_type, dtype, reason, default=reason)
    return None if reason is None else SlowDtype(backend, dtype, reason)


def warn_if_slow(backend: Backend, dtype: torch.dtype) -> bool:
    """Warn if a dtype is slow on a device, at its first region in this process that has no recipe.

    Listeners to ``events.slow_dtype`` are notified in place of a warning.

    Returns:
        Whether later regions do not warn.
    """
    if (key := (backend.device_type, dtype)) in _checked:
        return True
    override, _ = state.machine.innermost(backend.device_type)
    if override is not None and override.recipe is not None and override.recipe.ops:
        return False
    # Ask plugins, which imports them, only if somebody is told.
    is_told = events.slow_dtype or not _is_ignored()
    slow = find_slow_dtype(backend, dtype) if is_told and _reason(backend, dtype) else None
    if slow is not None and events.slow_dtype:
        events.slow_dtype.notify(*key)
    elif slow is not None:
        recipes = (f'recipe="{kind}"{note}' for kind, note in slow.faster_recipes().items())
        supported = answer(backend.supported_dtypes) or ()
        dtypes = (f"dtype={each}" for each in supported if find_slow_dtype(backend, each) is None)
        ways = ", ".join([*recipes, *dtypes, "float32, without a region"])
        warn_user(
            f"{slow}. It saves memory but no time. Faster: {ways}. To silence this: "
            'warnings.simplefilter("ignore", polycast.errors.SlowDtypeWarning).',
            SlowDtypeWarning,
        )
    _checked.add(key)
    return True


def _reason(backend: Backend, dtype: torch.dtype) -> str | None:
    reason = answer(backend.slow_reason, dtype)
    return reason if isinstance(reason, str) and reason else None


def _is_ignored() -> bool:
    """Return whether warnings of slow dtypes are ignored whatever they say, and wherever."""
    for action, message, category, module, line in warnings.filters:
        if issubclass(SlowDtypeWarning, category) and (action != "ignore" or not (message or module or line)):
            return action == "ignore"
    return False
