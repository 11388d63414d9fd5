"""`KernelPlan`: computes a recipe with the backend's kernels, from prepacked weights.

Prepacked weights are cached in the region's WeightCache or, without one, in a cache of the process: prepacking in each
region would cost more than a recipe saves.
"""

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import torch
from typing_extensions import override

from ...common.atfork import hold_during_fork
from ...common.events import events
from ...common.interrupts import raise_if_callers
from ...errors import warn_user
from ...policy import manifests
from ...policy.dtypes import dtype_name
from ...policy.recipe import Recipe
from ...registry.backend import Backend, LowBitKernel, overrides_is_capturing
from ...registry.checks import PLUGIN_ERRORS, check_recipe
from ...torch_internals.callers_state import call_outside
from ...torch_internals.private_names import is_intercepted
from ..casts.cast_cache import CastCache
from ..casts.not_prepacked import INTERCEPTED, NO_WEIGHT, NOT_CACHED
from ..casts.weights import caching_is_safe, parameter_of
from ..inference import in_function
from .actions import FALL_BACK, Action, ActionKind
from .equalized import checked_prepack, describe
from .in_dtype import in_dtype
from .operators import traced
from .plan import FLOATS, NO_KERNEL, RECORDS, SMALL, SUBCLASS, Computed, Performed, Plan, is_special
from .prepacked_format import PrepackedFormat, format_of
from .prepacking import prepacked

CANNOT_PREPACK = "the weight cannot be prepacked"
IN_FUNCTION = (
    "an autograd.Function computes it, so a backward may follow, and quantized kernels have none: use "
    "torch.inference_mode() for inference"
)
_CONSTANTS = (bool, int, float, str, torch.dtype, type(None))

_Veto: TypeAlias = Callable[[str, str, str, Sequence[Any]], str | None]

_lock = threading.RLock()  # reentrant: the garbage collector may run ops
hold_during_fork(lambda: [_lock])
_ids_by_backend: list[tuple[weakref.ref[Backend], dict[Hashable, int]]] = []
"""The ids of prepacked weights by backend; another instance of its class may prepack differently."""
_unused_ids = itertools.count(1)
_formats: dict[int, PrepackedFormat] = {}
"""By their id, the format of prepacked weights."""


class _ProcessCache:
    """The cache of prepacked weights for regions without a WeightCache."""

    def __init__(self) -> None:
        self._cache: CastCache | None = None

    @property
    def cache(self) -> CastCache:
        found = self._cache
        if found is None:
            found = self._cache = CastCache()
        return found

    @property
    def existing(self) -> CastCache | None:
        """The cache, if it exists."""
        return self._cache

    def clear(self) -> None:
        """Empty the cache."""
        found = self._cache
        if found is not None:
            found.clear()

    def drop(self) -> None:
        """Delete the cache; the next use makes another."""
        self._cache = None


process_cache = _ProcessCache()


class KernelPlan(Plan):
    """Computes ops by one recipe with the kernels of one backend."""

    def __init__(self, backend: Backend, recipe: Recipe) -> None:
        super().__init__(backend, recipe)
        self._min_size = recipe.min_size
        accelerator = torch.accelerator.current_accelerator()
        self._may_capture = overrides_is_capturing(backend) or (
            accelerator is not None and accelerator.type == backend.device_type
        )
        self.unavailable_reason = NO_KERNEL
        answer = check_recipe(backend, recipe)
        if answer.available:
            self.kernels = call_outside(backend.low_bit_kernels, recipe)
        else:
            self.unavailable_reason = answer.reason
        self._prepack_ids = {op: _prepack_id(backend, recipe, op, kernel) for op, kernel in self.kernels.items()}
        self._prepack = {op: checked_prepack(kernel, recipe, op) for op, kernel in self.kernels.items()}
        for op, kernel in self.kernels.items():
            _formats.setdefault(self._prepack_ids[op], format_of(backend, recipe, op, kernel))
        self._actions = {op: self._action(op, kernel) for op, kernel in self.kernels.items()}

    def _action(self, op: str, kernel: LowBitKernel) -> Action | None:
        """Return the action that calls a kernel's operator; None without one, or if Python must check for a capture."""
        if kernel.operator is None or self._may_capture:
            return None
        for constant in kernel.constants:
            if not isinstance(constant, _CONSTANTS):
                raise TypeError(
                    f"{type(kernel).__name__}.constants must be numbers, strings, dtypes or None, got {constant!r}"
                )
        return Action(
            ActionKind.OPERATOR, kernel.weight, self._prepack_ids[op], kernel.operator, tuple(kernel.constants)
        )

    def prepack_id(self, op: str) -> int:
        """Return the id of the weights that an op's kernel prepacks: the same for those that are interchangeable."""
        return self._prepack_ids[op]

    def prepacked_format(self, op: str) -> PrepackedFormat:
        """Return the format of the weights that an op's kernel prepacks."""
        return format_of(self.backend, self.recipe, op, self.kernels[op])

    def prepack(self, op: str, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return a weight as an op's kernel prepacks it; empty if it cannot."""
        return self._prepack[op](weight) or ()

    def unsupported_reason(
        self, op: str, args: Sequence[Any], checked: bool = False, with_vetoes: bool = True
    ) -> str | None:
        """Return why an op falls back to the fast dtype, or None. It may still do so if its weight cannot be prepacked.

        Args:
            op: by its name in the dispatcher.
            args: its arguments, in the order of the schema.
            checked: whether the caller has checked the tensors.
            with_vetoes: whether to ask the vetoes of plugins, such as that the kernel is slower.
        """
        kernel = self.kernels.get(op)
        if kernel is None:
            return self.unavailable_reason
        if not checked and (reason := self._unsupported_tensor(args, torch.is_grad_enabled())) is not None:
            return reason
        weight = args[kernel.weight]
        if not isinstance(weight, torch.Tensor):
            return "its weight is no tensor"
        if weight.numel() < self._min_size:
            return SMALL
        reason = kernel.unsupported_reason(*args)
        if reason is not None or not with_vetoes:
            return reason
        given = (veto(self.device_type, self.recipe.kind, op, args) for veto in _vetoes())
        return next((each for each in given if each is not None), None)

    def _unsupported_tensor(self, args: Sequence[Any], records: bool) -> str | None:
        for arg in args:
            if isinstance(arg, torch.Tensor):
                if arg.device.type != self.device_type and not arg.is_meta:
                    return f"a tensor is on {arg.device.type}"
                if arg.dtype not in FLOATS:
                    return f"a tensor is {dtype_name(arg.dtype)}"
                if arg.layout is not torch.strided or arg.is_nested:
                    return "a tensor is not strided"
                if records and arg.requires_grad:
                    return RECORDS
        return None

    @override
    def why_no_kernel(self, op: str) -> str | None:
        return None if op in self.kernels else self.unavailable_reason

    @override
    def why_not(self, op: str, args: Sequence[Any]) -> str | None:
        if op not in self.kernels:
            return self.unavailable_reason
        weight = args[self.kernels[op].weight]
        if isinstance(weight, torch.Tensor) and not weight.is_meta and parameter_of(weight) is None:
            return NO_WEIGHT
        return self.unsupported_reason(op, args)

    @override
    def explain(self, op: str, args: Sequence[Any], cache: CastCache | None, dtype: torch.dtype) -> Computed:
        kernel = self.kernels[op]
        return Computed(reason=describe(self.recipe, kernel, op, args[kernel.weight]))

    @override
    def perform(self, op: str, args: Sequence[Any], cache: CastCache | None, checked: bool) -> Performed:
        result: torch.Tensor | str
        action: Action | None = None
        if in_function():
            result, action = IN_FUNCTION, FALL_BACK
        elif not checked and is_intercepted():
            result = INTERCEPTED
        elif events.calibration.here():
            result = self._calibrate(op, args)
        else:
            result, action = self.compute(op, args, cache, checked)
            if result is INTERCEPTED:
                result = traced(op, self, args, cache)
                if isinstance(result, torch.Tensor):
                    return result, None  # the operator notifies when it runs
        if events.recipe_call or events.calibration:
            action = None  # they are notified of each call
        self.notify(op, result if isinstance(result, str) else None)
        return None if isinstance(result, str) else result, action

    def _calibrate(self, op: str, args: Sequence[Any]) -> torch.Tensor | str:
        """Notify this thread's listeners of a call, and compute it in float32; or return why it falls back."""
        reason = self.unsupported_reason(op, args, with_vetoes=False)  # batches may have other sizes than the program's
        if reason is not None:
            return reason
        events.calibration.notify(self, op, args)
        return in_dtype(op, args, torch.float32).to(torch.get_autocast_dtype(self.device_type))

    @override
    def compute(
        self, op: str, args: Sequence[Any], cache: CastCache | None, checked: bool = False
    ) -> tuple[torch.Tensor | str, Action | None]:
        reason = self.unsupported_reason(op, args, checked)
        if reason is not None:
            return reason, FALL_BACK
        kernel = self.kernels[op]
        weight: torch.Tensor = args[kernel.weight]
        if self._may_capture and self.backend.is_capturing():
            return NOT_CACHED, None
        # Traced tensors are of subclasses too, but caching is not safe then.
        if not checked and any(isinstance(arg, torch.Tensor) and is_special(arg) for arg in args) and caching_is_safe():
            return SUBCLASS, None
        where = process_cache.cache if cache is None else cache
        prepared = prepacked(where, weight, self._prepack_ids[op], self._prepack[op])
        if prepared is None:
            return CANNOT_PREPACK, None
        if isinstance(prepared, str):
            return prepared, None
        result = kernel.run(prepared, *args)
        dtype = torch.get_autocast_dtype(self.device_type)
        return result if result.dtype is dtype else result.to(dtype), self._actions[op]


@functools.cache
def _vetoes() -> list[_Veto]:
    """Return the functions of plugins that say why a kernel should not compute a call; see `Plugin`."""
    found = []
    for manifest in manifests.manifests():
        for path in manifest.plugin.vetoes:
            try:
                found.append(_guarded(manifest.resolve(path), path))
            except RuntimeError as error:
                warn_user(str(error))
    return found


def _guarded(veto: _Veto, path: str) -> _Veto:
    """Return a veto that warns of what it raises, and leaves the op to the kernel then."""

    def ask(device_type: str, kind: str, op: str, args: Sequence[Any]) -> str | None:
        try:
            return veto(device_type, kind, op, args)
        except PLUGIN_ERRORS as error:
            raise_if_callers(error)
            warn_user(f"{path}, a veto of a plugin, failed for {op}: {type(error).__name__}: {error}")
            return None

    return ask


def format_of_id(prepack_id: int) -> PrepackedFormat:
    """Return the format of the prepacked weights that have an id."""
    return _formats[prepack_id]


def _prepack_id(backend: Backend, recipe: Recipe, op: str, kernel: LowBitKernel) -> int:
    # Not by kernel: equal recipes share prepacked weights, and may have kernels of their own.
    key = recipe.format, kernel.prepack_key, op if kernel.prepack_key is None else None
    with _lock:
        _ids_by_backend[:] = [known for known in _ids_by_backend if known[0]() is not None]
        ids = next((ids for of, ids in _ids_by_backend if of() is backend), None)
        if ids is None:
            ids = {}
            _ids_by_backend.append((weakref.ref(backend), ids))
        return ids.setdefault(key, next(_unused_ids))
