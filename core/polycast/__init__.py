"""Autocast for PyTorch as a plugin system.

PYTEST_DONT_REWRITE: pytest, which finds its options in this distribution, has no assertion to rewrite here.
"""

from .autograd import custom_bwd, custom_fwd
from .backend import Availability, Backend
from .capture import Snapshot, capture
from .discovery import BackendStatus
from .engine import install, uninstall
from .errors import (
    AutocastDisabledWarning,
    BackendBrokenError,
    BackendConflictError,
    BackendNotFoundError,
    InvalidBackendError,
    StaleWeightError,
)
from .hookspecs import hookimpl
from .interop.patch import patch_torch
from .ops import OpRegistration, register_op
from .out_dtype import out_dtype
from .policy import CastPolicy, policy_table
from .products import float32_products
from .region import autocast, autocast_decorator
from .registry import (
    backends,
    get_backend,
    is_autocast_available,
    register_backend,
    unregister_backend,
)
from .scaler import grad_scaler
from .standard import STANDARD_POLICIES, STANDARD_REMEDIES
from .switches import (
    autocast_nesting,
    clear_autocast_cache,
    get_autocast_dtype,
    is_autocast_cache_enabled,
    is_autocast_enabled,
    set_autocast_cache_enabled,
    set_autocast_dtype,
    set_autocast_enabled,
)
from .weights import WeightCache, WeightCacheStats

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
    "InvalidBackendError",
    "OpRegistration",
    "Snapshot",
    "StaleWeightError",
    "WeightCache",
    "WeightCacheStats",
    "autocast",
    "autocast_decorator",
    "autocast_nesting",
    "backends",
    "capture",
    "clear_autocast_cache",
    "custom_bwd",
    "custom_fwd",
    "float32_products",
    "get_autocast_dtype",
    "get_backend",
    "grad_scaler",
    "hookimpl",
    "install",
    "is_autocast_available",
    "is_autocast_cache_enabled",
    "is_autocast_enabled",
    "out_dtype",
    "patch_torch",
    "policy_table",
    "register_backend",
    "register_op",
    "set_autocast_cache_enabled",
    "set_autocast_dtype",
    "set_autocast_enabled",
    "uninstall",
    "unregister_backend",
]
