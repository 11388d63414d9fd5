"""Autocast for PyTorch as a plugin system: mixed precision on any device.

Start with :class:`autocast`. :func:`observe` shows what ran in which dtype, :func:`profile` what is fast on a device.
"""

import importlib
from typing import TYPE_CHECKING, Any

try:
    importlib.import_module("torch")
except ModuleNotFoundError as error:
    if error.name != "torch":  # torch is installed, but lacks a dependency
        raise
    from .errors import torch_is_missing

    raise torch_is_missing() from None

if TYPE_CHECKING:
    from polycast_plugins.dropin.patch import patch_torch as patch_torch
    from polycast_plugins.fastest.device_profile import DeviceProfile as DeviceProfile
    from polycast_plugins.fastest.fastest_recipe import Fastest as Fastest
    from polycast_plugins.fastest.profile import find_profile as find_profile
    from polycast_plugins.fastest.profile import profile as profile
    from polycast_plugins.observe.grad_scaler import grad_scaler as grad_scaler
    from polycast_plugins.observe.observer import observe as observe
    from polycast_plugins.observe.run_history import RunHistory as RunHistory
    from polycast_plugins.observe.run_log import RunLog as RunLog
    from polycast_plugins.out_dtype.operator import out_dtype as out_dtype
    from polycast_plugins.precision.compare import compare as compare
    from polycast_plugins.precision.comparison import Reference as Reference
    from polycast_plugins.precision.equalize import equalize as equalize
    from polycast_plugins.precision.explain import explain as explain
    from polycast_plugins.precision.tune import tune as tune
    from polycast_plugins.quantize.equalization import Equalization as Equalization
    from polycast_plugins.quantize.low_bit_recipes import Float8 as Float8
    from polycast_plugins.quantize.low_bit_recipes import Int4 as Int4
    from polycast_plugins.quantize.low_bit_recipes import Int8 as Int8

    from .common.versions import __version__ as __version__
    from .engine.casts.cast_cache import WeightCacheStats as WeightCacheStats
    from .engine.casts.weight_cache import WeightCache as WeightCache
    from .engine.installation import install as install
    from .engine.installation import uninstall as uninstall
    from .engine.register_op import OpRegistration as OpRegistration
    from .engine.register_op import register_op as register_op
    from .policy.cast_policy import CastPolicy as CastPolicy
    from .policy.recipe import NoRecipe as NoRecipe
    from .policy.value import Policy as Policy
    from .region.autocast import autocast as autocast
    from .region.autocast import autocast_decorator as autocast_decorator
    from .region.capture import Snapshot as Snapshot
    from .region.capture import capture as capture
    from .region.custom_function import custom_bwd as custom_bwd
    from .region.custom_function import custom_fwd as custom_fwd
    from .region.explanation import Explanation as Explanation
    from .region.module_rules import ModuleRules as ModuleRules
    from .region.module_rules import apply_policy as apply_policy
    from .region.module_rules import remove_policy as remove_policy
    from .region.module_rules import rules_of as rules_of
    from .region.thread_state import autocast_nesting as autocast_nesting
    from .region.thread_state import clear_autocast_cache as clear_autocast_cache
    from .region.thread_state import get_autocast_dtype as get_autocast_dtype
    from .region.thread_state import is_autocast_cache_enabled as is_autocast_cache_enabled
    from .region.thread_state import is_autocast_enabled as is_autocast_enabled
    from .region.thread_state import set_autocast_cache_enabled as set_autocast_cache_enabled
    from .region.thread_state import set_autocast_dtype as set_autocast_dtype
    from .region.thread_state import set_autocast_enabled as set_autocast_enabled
    from .registry.backend_loader import BackendStatus as BackendStatus
    from .registry.registry import backends as backends
    from .registry.registry import is_autocast_available as is_autocast_available

from . import errors as errors
from . import plugin as plugin
from .common.lazy_names import lazy_names

# An exported program may call this operator, so torch has to know it from the start.
importlib.import_module(".engine.casts.cached_cast", __name__)

_LAZY_NAMES = {
    "BackendStatus": "registry.backend_loader",
    "CastPolicy": "policy.cast_policy",
    "Explanation": "region.explanation",
    "ModuleRules": "region.module_rules",
    "NoRecipe": "policy.recipe",
    "OpRegistration": "engine.register_op",
    "Policy": "policy.value",
    "Snapshot": "region.capture",
    "WeightCache": "engine.casts.weight_cache",
    "WeightCacheStats": "engine.casts.cast_cache",
    "__version__": "common.versions",
    "apply_policy": "region.module_rules",
    "autocast": "region.autocast",
    "autocast_decorator": "region.autocast",
    "autocast_nesting": "region.thread_state",
    "backends": "registry.registry",
    "capture": "region.capture",
    "clear_autocast_cache": "region.thread_state",
    "custom_bwd": "region.custom_function",
    "custom_fwd": "region.custom_function",
    "get_autocast_dtype": "region.thread_state",
    "install": "engine.installation",
    "is_autocast_available": "registry.registry",
    "is_autocast_cache_enabled": "region.thread_state",
    "is_autocast_enabled": "region.thread_state",
    "register_op": "engine.register_op",
    "remove_policy": "region.module_rules",
    "rules_of": "region.module_rules",
    "set_autocast_cache_enabled": "region.thread_state",
    "set_autocast_dtype": "region.thread_state",
    "set_autocast_enabled": "region.thread_state",
    "uninstall": "engine.installation",
}
"""The module of each name of the core; plugins add theirs. Names are imported when they are first used."""


_get_own = lazy_names(__name__, _LAZY_NAMES)


def _get(name: str) -> Any:
    if name != "__all__" and (name in _LAZY_NAMES or name.startswith("__")):
        return _get_own(name)
    from .policy import public_names

    if name == "__all__":
        return sorted({*_LAZY_NAMES, *public_names.names()} - {"__version__"})
    return public_names.find(name)


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = _get


def __dir__() -> list[str]:
    here = (name for name in globals() if name.startswith("__") or name in ("errors", "plugin"))
    return sorted({*_get("__all__"), "__version__", *here})
