"""The native engine: the interface of the C++ to Python."""

import itertools
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils.weak import WeakIdRef
from typing_extensions import override

from ...common.atfork import call_in_forked_child, hold_during_fork
from ...common.events import events
from ...errors import StaleWeightError
from ...policy.cast_policy import CastPolicy
from ...policy.matching import operands_of
from ...policy.schemas import COMPOSED_OPS, hidden_writes, overload_with_dtype
from ...registry.backend import Backend, overrides_is_capturing
from ...torch_internals.dispatcher import OpOverload
from ...torch_internals.private_names import disable_dynamo
from ..casts.cast_cache import CastCache, caches_alive, process_cache
from ..casts.traced import cast_of_traced
from ..casts.unversioned_writes import COLLECTIVES, EXPOSING_OPS, WRITING_OPS, unwatch, watch
from ..casts.weights import STALE, storages_are_rewritten
from ..kernels import Kernels, autocast_key, refusal
from ..override import Override
from ..recipes.actions import AS_IT_IS, CACHED_CAST, ActionKind, Results
from ..recipes.prepacking import NOT_PREPACKED
from ..state import Settings

# The numbers that C++ has for the same names, which bind() checks.
_POLICIES = {
    "NONE": -1,
    **{policy.name: number for number, policy in enumerate(CastPolicy)},
    "RECIPE": len(CastPolicy),
}
_NUMBERS: dict[str, dict[str, int]] = {
    "policies": _POLICIES,
    "not_prepacked": {name: number for number, name in enumerate(NOT_PREPACKED)},
    "actions": {kind.name: kind for kind in ActionKind},
    "prepack_ids": {"AS_IT_IS": AS_IT_IS, "CACHED_CAST": CACHED_CAST},
    "settings": {name: number for number, name in enumerate(Settings._fields)},
}

# The ops, for all engines of a process: two that are loaded from one file share what is in it.
_numbers: dict[str, int] = {}
_names: dict[int, str] = {}
_unused_numbers = itertools.count()
_NOT_PREPACKED = tuple(NOT_PREPACKED.values())


class NativeEngine:
    """The engine in C++."""

    name = "native"
    caches = True

    def __init__(self, extension: ModuleType, origin: str, sources: Mapping[str, bytes]) -> None:
        self.origin = origin
        self.build_failure = ""
        self.sources = sources
        extension.bind(
            {
                "numbers": _NUMBERS,
                "native_override": self._native_override,
                "native_store": self.store,
                "storages_are_rewritten": storages_are_rewritten,
                "stale_weight_error": StaleWeightError,
                "stale_weight_message": STALE,
                "cast_of_traced": cast_of_traced,
                "is_exporting": torch.compiler.is_exporting,
                "store_by_identity": self._store_by_identity,
                "perform_recipe": self._perform_recipe,
                "note_match": lambda op, device_type: events.matched_call.notify(device_type, _names[op]),
                "storage_part": torch.UntypedStorage(2)[:1],  # type: ignore[no-untyped-call]
                "weak_id_ref": WeakIdRef,
            }
        )
        # As a lock: a fork waits for threads that clear torch's cache of casts.
        torchs_cache = SimpleNamespace(acquire=extension.acquire_for_fork, release=extension.release_after_fork)
        hold_during_fork(lambda: [torchs_cache])
        call_in_forked_child(extension.forget_other_threads)
        self._extension = extension
        self._is_watching = False
        # See StateMachine.
        self.enter: Callable[[object, Settings], bool] = extension.enter
        self.leave: Callable[[object], bool | None] = extension.leave
        self.last = extension.last
        self.innermost = extension.innermost
        self.nesting = extension.nesting
        self.open_regions = extension.open_regions
        self.runs_kernel = extension.runs_kernel
        self.dtype: Callable[[str], torch.dtype] = extension.dtype
        self.excluded_keys: Callable[[], int] = extension.excluded_keys
        self.clear_own_casts = extension.clear_own_casts
        self.forget_actions: Callable[[], None] = extension.forget_actions
        self.set_recomputing: Callable[[int | None], None] = extension.set_recomputing
        self.region_methods = extension.region_methods
        self.observing: Callable[[], object] = extension.observing
        """Return the capsule that an observer binds to."""

    def number(self, name: str) -> int:
        """Return the number of an op in kernels and overrides."""
        number = _numbers.setdefault(name, next(_unused_numbers))  # two threads never get one for two ops
        _names[number] = name
        return number

    # Returns the action as native/recipes/actions.h reads it.
    @disable_dynamo
    def _perform_recipe(
        self, op: int, device_type: str, checked: bool, args: tuple[Any, ...]
    ) -> tuple[Results | None, tuple[Any, ...] | None]:
        from ..recipes import plan  # most regions have no recipe

        result, action = plan.perform(_names[op], device_type, args, checked)
        if action is None:
            return result, None
        kind, weight, prepack_id, operator, constants = action
        name, overload = ("", "") if operator is None else (operator._schema.name, operator._schema.overload_name)
        cache = process_cache.existing
        store = None if cache is None else self.store(cache)
        return result, (kind, weight, prepack_id, name, overload, constants, store)

    def register_recipe_op(self, name: str, op: str, compute: Callable[..., torch.Tensor]) -> None:
        """See :class:`StateMachine`."""
        self._extension.register_recipe_op(name, op, self.number(op), compute)

    def prepacked(
        self, cache: CastCache, weight: torch.Tensor, prepack_id: int, prepack: Callable[[torch.Tensor], Any]
    ) -> tuple[torch.Tensor, ...] | str | None:
        """See :class:`StateMachine`."""
        found: tuple[torch.Tensor, ...] | int | None
        found = self._extension.prepacked(self.store(cache), weight, prepack_id, prepack)
        return _NOT_PREPACKED[found] if isinstance(found, int) else found

    @disable_dynamo
    def store(self, cache: CastCache) -> Any:
        """See :class:`StateMachine`."""
        return cache.store(self._extension.UserStore)

    def _store_by_identity(self, identity: int) -> Any:
        cache = caches_alive.get(identity)
        return None if cache is None else self.store(cache)

    @disable_dynamo
    def _native_override(self, override: Override) -> Any:
        if override.native is None:
            policies = {self.number(name): _POLICIES[policy.name] for name, policy in override.policies.items()}
            policies |= {self.number(name): _POLICIES["RECIPE"] for name in override.recipe_ops}
            recipe = "" if override.recipe is None else override.recipe.text
            override.native = self._extension.Override(policies, recipe)
        return override.native

    def watch_writes(self) -> None:
        """Watch for writes to weights that do not increment the version."""
        if not self._is_watching:
            self._extension.watch_writes(WRITING_OPS, COLLECTIVES, EXPOSING_OPS)
            watch(self._extension)
            self._is_watching = True

    def unwatch_writes(self) -> None:
        """Undo :meth:`watch_writes`."""
        if self._is_watching:
            self._extension.unwatch_writes()
            unwatch()
            self._is_watching = False

    def kernels(self, backend: Backend, policies: Mapping[str, CastPolicy]) -> Kernels:
        """Install a backend's kernels."""
        return _NativeKernels(backend, policies, self, self._extension)


class _NativeKernels(Kernels):
    def __init__(
        self, backend: Backend, policies: Mapping[str, CastPolicy], engine: NativeEngine, extension: ModuleType
    ) -> None:
        self._engine = engine
        self._extension = extension
        self._registrations = extension.KernelRegistrations(backend.device_type, autocast_key(backend.device_type))
        # Asking costs the GIL at each cast of a weight, so those that never capture are not asked.
        # True: as if it always captured.
        is_capturing: Any = backend.is_capturing if overrides_is_capturing(backend) else None
        self._is_capturing = is_capturing if backend.caches_casts else True
        missing = backend.missing_kernels.items()
        self._missing_layouts = tuple(pair for pair in missing if isinstance(pair[0], torch.layout))
        super().__init__(backend, policies)

    @override
    def _register(self, name: str, op: OpOverload, policy: CastPolicy | None) -> None:
        with_dtype = overload_with_dtype(op)
        self._registrations.impl(
            name,
            self._engine.number(name),
            _POLICIES["NONE" if policy is None else policy.name],
            refusal(self.backend, name),
            None if with_dtype is None else f"{with_dtype._schema.name}.{with_dtype._schema.overload_name}",
            *hidden_writes(op),
            name in COMPOSED_OPS,
            operands_of(op),
            (self.backend.missing_dtypes(name), self._missing_layouts),
            self._is_capturing,
        )

    @override
    def _register_cached_cast(self) -> None:
        self._registrations.cached_cast(self._is_capturing)

    @override
    def _register_fallthrough(self) -> None:
        self._registrations.fallthrough()

    @override
    def _unregister(self) -> None:
        self._registrations.remove()
