"""Autocast for PyTorch as a plugin system.

PYTEST_DONT_REWRITE: pytest, which finds its options in this distribution, has no assertion to rewrite here.
"""

import importlib
from typing import TYPE_CHECKING, Any

try:
    importlib.import_module("torch")
except ModuleNotFoundError as error:
    if error.name != "torch":  # torch is there, and lacks what it needs
        raise
    from .errors import torch_is_missing

    raise torch_is_missing() from None

from .drop_in.patch import patch_torch
from .engine.installation import install, uninstall
from .engine.register_op import OpRegistration, register_op
from .engine.weight_cache import WeightCache, WeightCacheStats
from .errors import (
    AutocastDisabledWarning,
    BackendBrokenError,
    BackendConflictError,
    BackendNotFoundError,
    InvalidBackendError,
    RecipeDisabledWarning,
    StaleWeightError,
)
from .out_dtype.matmul_kernels import float32_products
from .out_dtype.operator import out_dtype
from .plugins.backend import Availability, Backend, LowBitKernel
from .plugins.discovery import BackendStatus
from .plugins.hookspecs import hookimpl
from .plugins.registry import backends, get_backend, is_autocast_available, register_backend, unregister_backend
from .policy.cast_policy import CastPolicy, policy_table
from .policy.recipes import Float8, Int8, NoRecipe, Recipe
from .policy.standard import STANDARD_POLICIES, STANDARD_REMEDIES
from .policy.value import Policy
from .region.autocast import autocast, autocast_decorator
from .region.capture import Snapshot, capture
from .region.custom_function import custom_bwd, custom_fwd
from .region.grad_scaler import grad_scaler
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

if TYPE_CHECKING:
    from .engine.native.ops import load_ops
    from .precision.compare import compare
    from .precision.comparison import Comparison
    from .precision.evidence import Evidence, Tuned
    from .precision.observe.observation import Observation
    from .precision.observe.observe import observe
    from .precision.tune import tune
    from .region.explain import explain
    from .region.explanation import Explanation
    from .region.module_rules import ModuleRules, apply_policy

_AT_FIRST_USE = {
    "Comparison": "precision.comparison",
    "Evidence": "precision.evidence",
    "Explanation": "region.explanation",
    "ModuleRules": "region.module_rules",
    "Observation": "precision.observe.observation",
    "Tuned": "precision.evidence",
    "apply_policy": "region.module_rules",
    "compare": "precision.compare",
    "explain": "region.explain",
    "load_ops": "engine.native.ops",
    "observe": "precision.observe.observe",
    "tune": "precision.tune",
}
"""What few programs use, by its module: the others need not wait for it."""

__all__ = [
    "STANDARD_POLICIES",
    "STANDARD_REMEDIES",
    "AutocastDisabledWarning",
    "Availability",
    "Backend",
    "BackendBrokenError",
    "BackendConflictError",
    "BackendNotFoundError",
    "BackendStatus",
    "CastPolicy",
    "Comparison",
    "Evidence",
    "Explanation",
    "Float8",
    "Int8",
    "InvalidBackendError",
    "LowBitKernel",
    "ModuleRules",
    "NoRecipe",
    "Observation",
    "OpRegistration",
    "Policy",
    "Recipe",
    "RecipeDisabledWarning",
    "Snapshot",
    "StaleWeightError",
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
    "explain",
    "float32_products",
    "get_autocast_dtype",
    "get_backend",
    "grad_scaler",
    "hookimpl",
    "install",
    "is_autocast_available",
    "is_autocast_cache_enabled",
    "is_autocast_enabled",
    "load_ops",
    "observe",
    "out_dtype",
    "patch_torch",
    "policy_table",
    "register_backend",
    "register_op",
    "set_autocast_cache_enabled",
    "set_autocast_dtype",
    "set_autocast_enabled",
    "tune",
    "uninstall",
    "unregister_backend",
]


def __getattr__(name: str) -> Any:
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_AT_FIRST_USE[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
