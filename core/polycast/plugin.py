"""The names that authors of backends, recipes and other plugins import.

- A device: :class:`Backend`, :class:`Availability`, the hook marker :data:`hookimpl`; :func:`get_backend`,
  :func:`register_backend`, :func:`unregister_backend`.
- Its op table: :class:`CastPolicy`, :func:`policy_table`, :data:`STANDARD_POLICIES`, :data:`STANDARD_REMEDIES`.
- A recipe, and kernels for recipes: :class:`Recipe`, :class:`LowBitKernel`, :class:`LowBitMatmul`,
  :func:`float32_products`, :func:`load_ops`.
- What a distribution adds besides devices: :class:`Plugin`.

Users of regions import from ``polycast``, and errors from ``polycast.errors``.
"""

from typing import TYPE_CHECKING

from .common.lazy_names import lazy_names

if TYPE_CHECKING:
    from .engine.register_backend import register_backend as register_backend
    from .engine.register_backend import unregister_backend as unregister_backend
    from .out_dtype.matmul_kernels import float32_products as float32_products
    from .policy.cast_policy import CastPolicy as CastPolicy
    from .policy.cast_policy import policy_table as policy_table
    from .policy.manifests import Plugin as Plugin
    from .policy.recipe_base import Recipe as Recipe
    from .policy.standard import STANDARD_POLICIES as STANDARD_POLICIES
    from .policy.standard import STANDARD_REMEDIES as STANDARD_REMEDIES
    from .registry.backend import Availability as Availability
    from .registry.backend import Backend as Backend
    from .registry.backend import LowBitKernel as LowBitKernel
    from .registry.hookspecs import hookimpl as hookimpl
    from .registry.low_bit_matmul import LowBitMatmul as LowBitMatmul
    from .registry.registry import get_backend as get_backend
    from .toolchain.load_ops import load_ops as load_ops

_PLACES = {
    "Availability": "registry.backend",
    "Backend": "registry.backend",
    "CastPolicy": "policy.cast_policy",
    "LowBitKernel": "registry.backend",
    "LowBitMatmul": "registry.low_bit_matmul",
    "Plugin": "policy.manifests",
    "Recipe": "policy.recipe_base",
    "STANDARD_POLICIES": "policy.standard",
    "STANDARD_REMEDIES": "policy.standard",
    "float32_products": "out_dtype.matmul_kernels",
    "get_backend": "registry.registry",
    "hookimpl": "registry.hookspecs",
    "load_ops": "toolchain.load_ops",
    "policy_table": "policy.cast_policy",
    "register_backend": "engine.register_backend",
    "unregister_backend": "engine.register_backend",
}
"""The module of each name. Names are imported when they are first used."""

__all__ = [*_PLACES]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy_names(__name__, _PLACES)


def __dir__() -> list[str]:
    return sorted(__all__)
