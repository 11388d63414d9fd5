"""The names that authors of backends, recipes and other plugins import.

- Backends: :class:`Backend`, :class:`Availability`, the hook marker :data:`hookimpl`; :func:`get_backend`,
  :func:`register_backend`, :func:`unregister_backend`, :func:`refresh`.
- Extensions, which add kernels or cast policies to a device that another package serves: :class:`Extension`.
- The version of this contract: :data:`API_VERSION`.
- Op tables: :class:`CastPolicy` (in ``polycast`` too), :func:`policy_table`, :data:`STANDARD_POLICIES`.
- Recipes and their kernels: :class:`Recipe`, :class:`Plan`, :class:`LowBitKernel`, :func:`recipe_kernels`.
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

from .common.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
