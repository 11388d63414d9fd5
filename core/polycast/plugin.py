"""The names that authors of backends, recipes and other plugins import.

- Backends: :class:`Backend`, :class:`Availability`, the hook marker :data:`hookimpl`; :func:`get_backend`,
  :func:`register_backend`, :func:`unregister_backend`, :func:`refresh`.
- Extensions, which add kernels or cast policies to a device that another package serves: :class:`Extension`.
- Op tables: :class:`CastPolicy` (in ``polycast`` too), :func:`policy_table`, :data:`STANDARD_POLICIES`.
- Recipes and their kernels: :class:`Recipe`, :class:`Plan`, :class:`LowBitKernel`, :func:`recipe_kernels`,
  :func:`float32_products`.
- C++: :func:`load_ops` compiles the ops of a package; a :class:`NativeLibrary` uses the native engine;
  :func:`choose_engine` returns the engine in use.
- Manifests: :class:`Plugin` is one, :func:`manifests` returns those installed, and :func:`lazy_names` imports the names
  of a package at their first use.
- Changes to torch: :class:`Feature`, :class:`Patch`; a private name of torch: :func:`torch_name`.
- Queries of a backend: :func:`check`, :func:`find_slow_dtype`, :func:`drift_of`; of a region: :func:`decide`,
  :func:`explain_op`; of ops, dtypes and recipes by name: :func:`find_op`, :func:`dtype_name`, :func:`read_dtype`,
  :func:`all_recipes`, :func:`read_recipe`. The base class of what tools return: :class:`Result`.
- The base class of regions that stand in for those of another library: :class:`LibraryRegion`.
- To run code without autocast or Dynamo: :func:`disable_autocast`, :func:`disable_dynamo`; to call code of another
  package: :func:`call_outside`; to hold locks over a fork: :func:`hold_during_fork`; to keep a file for the user:
  :class:`CacheFile`; to read a tensor's memory: :func:`memory_of`; to replace the forward of one module:
  :class:`InstanceForward`; to be notified of what happens: :class:`events`.

Users of regions import from ``polycast``, and errors from ``polycast.errors``.
"""

from typing import TYPE_CHECKING

from .common.lazy_names import lazy_names as lazy_names

if TYPE_CHECKING:
    from .common.atfork import hold_during_fork as hold_during_fork
    from .common.events import events as events
    from .engine.choice import choose_engine as choose_engine
    from .engine.disable_dynamo import disable_dynamo as disable_dynamo
    from .engine.drift import drift_of as drift_of
    from .engine.native_library import NativeLibrary as NativeLibrary
    from .engine.recipes.plan import Plan as Plan
    from .engine.register_backend import refresh as refresh
    from .engine.register_backend import register_backend as register_backend
    from .engine.register_backend import unregister_backend as unregister_backend
    from .policy.cast_policy import CastPolicy as CastPolicy
    from .policy.cast_policy import policy_table as policy_table
    from .policy.dtypes import dtype_name as dtype_name
    from .policy.manifests import Plugin as Plugin
    from .policy.manifests import manifests as manifests
    from .policy.names import read_dtype as read_dtype
    from .policy.recipe import Recipe as Recipe
    from .policy.recipe import all_recipes as all_recipes
    from .policy.recipe import read_recipe as read_recipe
    from .policy.result import Result as Result
    from .policy.schemas import find_op as find_op
    from .policy.standard import STANDARD_POLICIES as STANDARD_POLICIES
    from .region.explain_op import decide as decide
    from .region.explain_op import explain_op as explain_op
    from .region.instance_forward import InstanceForward as InstanceForward
    from .region.library_region import LibraryRegion as LibraryRegion
    from .region.slow_dtype import find_slow_dtype as find_slow_dtype
    from .registry.backend import Availability as Availability
    from .registry.backend import Backend as Backend
    from .registry.backend import Extension as Extension
    from .registry.backend import LowBitKernel as LowBitKernel
    from .registry.hookspecs import hookimpl as hookimpl
    from .registry.matmul_kernels import float32_products as float32_products
    from .registry.recipe_kernels import check as check
    from .registry.recipe_kernels import recipe_kernels as recipe_kernels
    from .registry.registry import get_backend as get_backend
    from .toolchain.cache_folder import CacheFile as CacheFile
    from .toolchain.load_ops import load_ops as load_ops
    from .torch_internals.builtin_functions import memory_of as memory_of
    from .torch_internals.callers_state import call_outside as call_outside
    from .torch_internals.dispatcher import disable_autocast as disable_autocast
    from .torch_internals.lookup import torch_name as torch_name
    from .torch_internals.patcher import Feature as Feature
    from .torch_internals.patcher import Patch as Patch

_PLACES = {
    "Availability": "registry.backend",
    "Backend": "registry.backend",
    "CacheFile": "toolchain.cache_folder",
    "CastPolicy": "policy.cast_policy",
    "Extension": "registry.backend",
    "Feature": "torch_internals.patcher",
    "InstanceForward": "region.instance_forward",
    "LibraryRegion": "region.library_region",
    "LowBitKernel": "registry.backend",
    "NativeLibrary": "engine.native_library",
    "Patch": "torch_internals.patcher",
    "Plan": "engine.recipes.plan",
    "Plugin": "policy.manifests",
    "Recipe": "policy.recipe",
    "Result": "policy.result",
    "STANDARD_POLICIES": "policy.standard",
    "all_recipes": "policy.recipe",
    "call_outside": "torch_internals.callers_state",
    "check": "registry.recipe_kernels",
    "choose_engine": "engine.choice",
    "decide": "region.explain_op",
    "disable_autocast": "torch_internals.dispatcher",
    "disable_dynamo": "engine.disable_dynamo",
    "drift_of": "engine.drift",
    "dtype_name": "policy.dtypes",
    "events": "common.events",
    "explain_op": "region.explain_op",
    "find_op": "policy.schemas",
    "find_slow_dtype": "region.slow_dtype",
    "float32_products": "registry.matmul_kernels",
    "get_backend": "registry.registry",
    "hold_during_fork": "common.atfork",
    "hookimpl": "registry.hookspecs",
    "lazy_names": "common.lazy_names",
    "load_ops": "toolchain.load_ops",
    "manifests": "policy.manifests",
    "memory_of": "torch_internals.builtin_functions",
    "policy_table": "policy.cast_policy",
    "read_dtype": "policy.names",
    "read_recipe": "policy.recipe",
    "recipe_kernels": "registry.recipe_kernels",
    "refresh": "engine.register_backend",
    "register_backend": "engine.register_backend",
    "torch_name": "torch_internals.lookup",
    "unregister_backend": "engine.register_backend",
}
"""The module of each name. Names are imported when they are first used."""

__all__ = [*_PLACES]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy_names(__name__, _PLACES)


def __dir__() -> list[str]:
    return sorted(__all__)
