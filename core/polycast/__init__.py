"""Autocast for PyTorch as a plugin system: mixed precision on any device.

Start with :class:`autocast`. :func:`observe` shows what ran in which dtype, :func:`profile` what is fast on a device.
"""

import importlib
from typing import TYPE_CHECKING

try:
    importlib.import_module("torch")
except ModuleNotFoundError as error:
    if error.name != "torch":  # torch is installed, but lacks a dependency
        raise
    from .errors import torch_is_missing

    raise torch_is_missing() from None

if TYPE_CHECKING:
    from .common.versions import __version__ as __version__
    from .drop_in.patch import patch_torch
    from .engine.casts.cast_cache import WeightCacheStats
    from .engine.fastest.fastest_recipe import Fastest
    from .engine.installation import install, uninstall
    from .engine.persistence.weight_cache import WeightCache
    from .engine.register_op import OpRegistration, register_op
    from .observer.observation import Observation
    from .observer.observe import observe
    from .observer.run_history import RunHistory
    from .observer.run_log import RunLog
    from .out_dtype.operator import out_dtype
    from .policy.cast_policy import CastPolicy
    from .policy.equalization import Equalization
    from .policy.recipe import Float8, Int4, Int8, NoRecipe
    from .policy.value import Policy
    from .precision.compare import compare
    from .precision.comparison import Comparison, Reference
    from .precision.equalize import equalize
    from .precision.evidence import Evidence, Tuned
    from .precision.explain import explain
    from .precision.model_explanation import ModelExplanation, ModuleExplanation
    from .precision.tune import tune
    from .profiling.device_profile import DeviceProfile
    from .profiling.profile import profile
    from .region.autocast import autocast, autocast_decorator
    from .region.capture import Snapshot, capture
    from .region.custom_function import custom_bwd, custom_fwd
    from .region.explanation import Explanation
    from .region.grad_scaler import grad_scaler
    from .region.module_rules import ModuleRules, apply_policy, remove_policy, rules_of
    from .region.thread_state import (
        autocast_nesting,
        clear_autocast_cache,
        get_autocast_dtype,
        is_autocast_cache_enabled,
        is_autocast_enabled,
        set_autocast_cache_enabled,
        set_autocast_dtype,
        set_autocast_enabled,
    )
    from .registry.backend_loader import BackendStatus
    from .registry.registry import backends, is_autocast_available

from . import errors as errors
from . import plugin as plugin
from .common.lazy_names import lazy_names

# An exported program may call this operator, so torch has to know it from the start.
importlib.import_module(".engine.casts.cached_cast", __name__)

# Import the package now, so that a later import does not replace the function of the same name.
importlib.import_module(".out_dtype", __name__)
del globals()["out_dtype"]

_LAZY_NAMES = {
    "BackendStatus": "registry.backend_loader",
    "CastPolicy": "policy.cast_policy",
    "Comparison": "precision.comparison",
    "DeviceProfile": "profiling.device_profile",
    "Equalization": "policy.equalization",
    "Evidence": "precision.evidence",
    "Explanation": "region.explanation",
    "Fastest": "engine.fastest.fastest_recipe",
    "Float8": "policy.recipe",
    "Int4": "policy.recipe",
    "Int8": "policy.recipe",
    "ModelExplanation": "precision.model_explanation",
    "ModuleExplanation": "precision.model_explanation",
    "ModuleRules": "region.module_rules",
    "NoRecipe": "policy.recipe",
    "Observation": "observer.observation",
    "OpRegistration": "engine.register_op",
    "Policy": "policy.value",
    "Reference": "precision.comparison",
    "RunHistory": "observer.run_history",
    "RunLog": "observer.run_log",
    "Snapshot": "region.capture",
    "Tuned": "precision.evidence",
    "WeightCache": "engine.persistence.weight_cache",
    "WeightCacheStats": "engine.casts.cast_cache",
    "__version__": "common.versions",
    "apply_policy": "region.module_rules",
    "autocast": "region.autocast",
    "autocast_decorator": "region.autocast",
    "autocast_nesting": "region.thread_state",
    "backends": "registry.registry",
    "capture": "region.capture",
    "clear_autocast_cache": "region.thread_state",
    "compare": "precision.compare",
    "custom_bwd": "region.custom_function",
    "custom_fwd": "region.custom_function",
    "equalize": "precision.equalize",
    "explain": "precision.explain",
    "get_autocast_dtype": "region.thread_state",
    "grad_scaler": "region.grad_scaler",
    "install": "engine.installation",
    "is_autocast_available": "registry.registry",
    "is_autocast_cache_enabled": "region.thread_state",
    "is_autocast_enabled": "region.thread_state",
    "observe": "observer.observe",
    "out_dtype": "out_dtype.operator",
    "patch_torch": "drop_in.patch",
    "profile": "profiling.profile",
    "register_op": "engine.register_op",
    "remove_policy": "region.module_rules",
    "rules_of": "region.module_rules",
    "set_autocast_cache_enabled": "region.thread_state",
    "set_autocast_dtype": "region.thread_state",
    "set_autocast_enabled": "region.thread_state",
    "tune": "precision.tune",
    "uninstall": "engine.installation",
}
"""The module of each public name. Names are imported when they are first used."""

__all__ = [
    "BackendStatus",
    "CastPolicy",
    "Comparison",
    "DeviceProfile",
    "Equalization",
    "Evidence",
    "Explanation",
    "Fastest",
    "Float8",
    "Int4",
    "Int8",
    "ModelExplanation",
    "ModuleExplanation",
    "ModuleRules",
    "NoRecipe",
    "Observation",
    "OpRegistration",
    "Policy",
    "Reference",
    "RunHistory",
    "RunLog",
    "Snapshot",
    "Tuned",
    "WeightCache",
    "WeightCacheStats",
    "apply_policy",
    "autocast",
    "autocast_decorator",
    "autocast_nesting",
    "backends",
    "capture",
    "clear_autocast_cache",
    "compare",
    "custom_bwd",
    "custom_fwd",
    "equalize",
    "explain",
    "get_autocast_dtype",
    "grad_scaler",
    "install",
    "is_autocast_available",
    "is_autocast_cache_enabled",
    "is_autocast_enabled",
    "observe",
    "out_dtype",
    "patch_torch",
    "profile",
    "register_op",
    "remove_policy",
    "rules_of",
    "set_autocast_cache_enabled",
    "set_autocast_dtype",
    "set_autocast_enabled",
    "tune",
    "uninstall",
]


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy_names(__name__, _LAZY_NAMES)

_PUBLIC_MODULES = ("distributed", "errors", "integrations", "plugin", "testing")


def __dir__() -> list[str]:
    here = (name for name in globals() if name.startswith("__") or name in _PUBLIC_MODULES)
    return sorted({*_LAZY_NAMES, *here})
