"""`Plan`: computes the ops of a recipe on a device."""

import functools
import itertools
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from ...common import generation
from ...common.events import events
from ...policy import manifests
from ...policy.names import dtype_name
from ...policy.recipe import Recipe
from ...registry.backend import Backend, LowBitKernel, overrides_is_capturing
from ...registry.registry import registry
from ...torch_internals.private_names import disable_dynamo, has_python_key, is_intercepted, tracing_context
from .. import state
from ..casts import cast_cache, traced, weights
from ..casts.cast_cache import CastCache
from ..inference import in_function
from ..kernels import installed
from ..override import Override
from . import actions, operators, prepacking
from .actions import ActionKind, Results
from .in_dtype import FLOATS, in_dtype

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_unused_ids = itertools.count(1)
_CONSTANTS = (bool, int, float, str, torch.dtype, type(None))

Performed: TypeAlias = tuple[Results | None, actions.Action | None]
"""The results, or None if the recipe declines the op; and the action for calls with the same metadata, if any."""


class Plan(ABC):
    """Computes the ops of one recipe with one backend, for a generation. Equal recipes share it.

    A recipe names the class of its plan as `plan_class`. A subclass overrides the abstract methods, and calls the
    others, which answer questions about a call and compute parts of it.

    Attributes:
        Action: how the native engine computes calls like one that was performed: :meth:`perform` returns it.
        Cache: the type of a region's cache: that of a :class:`polycast.WeightCache`.
        generation: the number of the generation in which it was made.
        kernels: by op, the kernel for the recipe that is asked first.
        may_capture: whether the device may capture calls into a graph, such as a CUDA graph. If so, no action calls an
            operator, and :meth:`Backend.is_capturing` is asked at each call.
        FLOATS: the dtypes that recipes convert.
        INTERCEPTED, NO_KERNEL, NO_WEIGHT, NOT_CACHED, RECORDS, SMALL, SUBCLASS: reasons to decline a call.
        DECLINED: the action that computes an op as without the recipe.
        FLOAT32: the action that casts tensors to float32, computes the op, and casts its results to the fast dtype.
            Autograd may record it.
        CACHED_CAST, AS_IT_IS: for :meth:`operator_action`, in place of the id of a prepacked weight.
    """

    class Computed(NamedTuple):
        """Describes how a recipe computes a call, for `explain`.

        Attributes:
            way: the name of the way that the recipe has chosen; empty for a recipe with one way.
            reason: why, or another remark.
            dtype: the dtype that the recipe casts tensors to; None for a kernel.
            package: the distribution whose kernel computes it; empty if torch's does, or if it is unknown.
        """

        way: str = ""
        reason: str = ""
        dtype: torch.dtype | None = None
        package: str = ""

    Action: TypeAlias = actions.Action
    Cache: TypeAlias = CastCache
    FLOATS = FLOATS
    INTERCEPTED = prepacking.INTERCEPTED
    NO_KERNEL = "the backend has no kernel for it"
    NO_WEIGHT = prepacking.NO_WEIGHT
    NOT_CACHED = prepacking.NOT_CACHED
    RECORDS = "autograd records it, and quantized kernels have no backward"
    SMALL = "the weight is smaller than the recipe's min_size"
    SUBCLASS = "a tensor is of a subclass that sees each op itself, or has no memory"
    DECLINED, FLOAT32 = Action(ActionKind.DECLINED), Action(ActionKind.FLOAT32)
    CACHED_CAST, AS_IT_IS = actions.CACHED_CAST, actions.AS_IT_IS
    is_intercepted = staticmethod(is_intercepted)
    in_dtype = staticmethod(in_dtype)
    in_function = staticmethod(in_function)

    def __init__(self, backend: Backend, recipe: Recipe) -> None:
        self.generation = generation.number
        self.backend = backend
        self.recipe = recipe
        self.device_type = backend.device_type
        self.kernels: Mapping[str, LowBitKernel] = {}
        accelerator = torch.accelerator.current_accelerator()
        self.may_capture = overrides_is_capturing(backend) or (
            accelerator is not None and accelerator.type == backend.device_type
        )

    @staticmethod
    def of(backend: Backend, recipe: Recipe) -> "Plan":
        """Return the plan of a recipe on a backend."""
        return _plan_of(generation.number, backend, recipe)

    @staticmethod
    def recipes_for(op: str) -> dict[str, Recipe]:
        """Return, by device, the recipes of this thread's enabled regions that compute an op."""
        found = {}
        for device_type in tuple(installed):
            override, _ = state.machine.innermost(device_type)
            if override is None or override.recipe is None or op not in override.recipe_ops:
                continue
            if torch.is_autocast_enabled(device_type):
                found[device_type] = override.recipe
        return found

    @abstractmethod
    def perform(self, op: str, args: Sequence[Any], cache: CastCache | None, checked: bool) -> Performed:
        """Compute an op, and call :meth:`notify`.

        Args:
            op: by its name in the dispatcher.
            args: its arguments, in the order of the schema.
            cache: the region's WeightCache, or None.
            checked: whether the caller has checked that the tensors are floating-point, strided and on the device, that
                they are of no subclass or transform, that nothing intercepts ops, and that autograd records nothing.

        Returns:
            The results, or None if the recipe declines the op; and what the native engine does for calls with the same
            metadata, or None if Python is asked each time.
        """

    def notify(self, op: str, reason: str | None, way: str = "", package: str = "") -> None:
        """Notify the listeners to ``events.recipe_call``, unless a compiler traces: its code notifies when it runs.

        Args:
            op: by its name in the dispatcher.
            reason: why the recipe declines it; None: it was computed.
            way: the way in which it was computed, of a recipe that has several.
            package: the distribution whose kernel computed it; empty if torch's did.
        """
        if events.recipe_call and tracing_context() is None:
            recipe = f"{self.recipe.short}:{way}" if way else self.recipe.short
            events.recipe_call.notify(self.device_type, recipe, op, reason, package)

    @abstractmethod
    def why_no_kernel(self, op: str) -> str | None:
        """Return why the recipe computes no call of an op; None if it may compute some."""

    @abstractmethod
    def explain(self, op: str, args: Sequence[Any], cache: CastCache | None, dtype: torch.dtype) -> Computed | str:
        """Return how a call is computed, given arguments that may be fake; or why the recipe declines it.

        Args:
            op, args, cache: as of :meth:`perform`.
            dtype: the fast dtype.
        """

    def unsupported_tensor(self, args: Sequence[Any], records: bool) -> str | None:
        """Return why a recipe computes no call with these tensors; None if it may.

        Args:
            args: the arguments of the call.
            records: whether a tensor that requires grad is such a reason.
        """
        for arg in args:
            if isinstance(arg, torch.Tensor):
                if arg.device.type != self.device_type and not arg.is_meta:
                    return f"a tensor is on {arg.device.type}"
                if arg.dtype not in self.FLOATS:
                    return f"a tensor is {dtype_name(arg.dtype)}"
                if arg.layout is not torch.strided or arg.is_nested:
                    return "a tensor is not strided"
                if records and arg.requires_grad:
                    return self.RECORDS
        return None

    @staticmethod
    def is_special(tensor: torch.Tensor) -> bool:
        """Return whether a tensor is of a subclass that sees each op itself, or has no memory."""
        return tensor.is_meta or (type(tensor) not in _PLAIN and has_python_key(tensor))

    @staticmethod
    def is_traced() -> bool:
        """Return whether a compiler, tracer, transform or dispatch mode sees the ops: tensors may be fake then."""
        return not weights.caching_is_safe()

    @staticmethod
    def weight_of(tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a weight itself, or the weight that a tensor is a plain view of; else None. Tensors may be traced.

        Weights are frozen parameters, and float32 leaves that require grad.
        """
        if tensor.dtype is torch.float32 and weights.caching_is_safe():
            return weights.weight_of(tensor)  # as the native engine, which decides for equal calls
        parameter = weights.parameter_of(tensor)
        return tensor if parameter is None and weights.is_weight(tensor) else parameter

    @staticmethod
    def has_cast(tensor: torch.Tensor, cache: CastCache | None) -> bool:
        """Return whether the region's WeightCache will have a tensor's cast: of a frozen weight, or at inference."""
        if cache is None or not torch.is_autocast_cache_enabled() or (tensor.requires_grad and torch.is_grad_enabled()):
            return False
        parameter = weights.parameter_of(tensor)
        return parameter is not None and weights.covers(tensor, parameter)

    @staticmethod
    def cast_of(tensor: torch.Tensor, dtype: torch.dtype, cache: CastCache | None) -> torch.Tensor:
        """Return the cast of a tensor, from the region's caches if it is a weight, or a view of all of one."""
        if tensor.dtype is dtype:
            return tensor
        is_traced = not weights.caching_is_safe()
        if cache is not None and is_traced:
            found = traced.cast_of_traced(tensor, dtype, tensor.device.type)
            return tensor.to(dtype) if found is None else found
        parameter = weights.parameter_of(tensor)
        if parameter is None or is_traced or not weights.covers(tensor, parameter) or not weights.is_dense(parameter):
            return tensor.to(dtype)
        cast: torch.Tensor = torch.ops.polycast.cached_cast(parameter, dtype, -1)
        return cast if tensor is parameter else cast.as_strided(tensor.shape, tensor.stride(), 0)

    def in_graph(self, op: str, args: Sequence[Any], cache: CastCache | None) -> torch.Tensor | str:
        """Replace an op by an operator in traced code; return its result there, or why the recipe declines it.

        When the code runs in a region of the recipe around it, the native engine computes the op as in eager code;
        otherwise the operator calls :meth:`compute`.

        Args:
            op, args, cache: as of :meth:`perform`; `op` is in `kernels`.
        """
        return operators.traced(op, self, args, cache, _plan_of_text)

    def compute(self, op: str, args: Sequence[Any], cache: CastCache | None) -> torch.Tensor | str:
        """Compute an op in compiled code, and call :meth:`notify`; return its result, or why the recipe declines it.

        A plan that calls :meth:`in_graph` overrides it.
        """
        raise NotImplementedError

    @staticmethod
    def prepacked(
        weight: torch.Tensor,
        cache: CastCache | None,
        prepack_id: int,
        prepack: Callable[[torch.Tensor], tuple[torch.Tensor, ...] | None],
    ) -> tuple[torch.Tensor, ...] | str | None:
        """Return a prepacked weight, from a cache or made and cached; or why it cannot be cached.

        Args:
            weight: the weight, or a view of one.
            cache: the region's WeightCache; None: the cache of the process.
            prepack_id: the id of what `prepack` makes, from :meth:`new_id`.
            prepack: prepacks the weight; returns None if it cannot, and so does this.
        """
        return prepacking.prepacked(
            cast_cache.process_cache.cache if cache is None else cache, weight, prepack_id, prepack
        )

    @staticmethod
    def new_id() -> int:
        """Return a new id for prepacked weights, which are found by it.

        Keep it outside the plan, so that the new plan after a refresh finds them.
        """
        return next(_unused_ids)

    def veto(self, op: str, args: Sequence[Any]) -> str | None:
        """Return why a kernel should not compute a call, by the `vetoes` in the manifests of plugins; or None."""
        vetoes = manifests.functions("vetoes")
        given = (veto.ask(self.device_type, self.recipe.kind, op, args) for veto in vetoes)
        return next((each for each in given if isinstance(each, str)), None)

    def operator_action(self, kernel: LowBitKernel, prepack_id: int) -> Action | None:
        """Return the action that calls a kernel's operator; None without one, or if calls may be captured.

        Args:
            kernel: the kernel.
            prepack_id: the id of the prepacked weight that the operator takes; CACHED_CAST: it takes the weight's cast;
                AS_IT_IS: the weight itself.
        """
        if kernel.operator is None or self.may_capture:
            return None
        for constant in kernel.constants:
            if not isinstance(constant, _CONSTANTS):
                raise TypeError(
                    f"{type(kernel).__name__}.constants must be numbers, strings, dtypes or None, got {constant!r}"
                )
        return self.call_action(kernel.operator, kernel.weight, prepack_id, tuple(kernel.constants))

    @staticmethod
    def call_action(operator: Any, weight: int, prepack_id: int, constants: tuple[Any, ...]) -> Action:
        """Return the action that calls an operator, which may record a call for autograd: see `Action`.

        Args:
            operator: takes the op's arguments, what is named next, the fast dtype and the constants.
            weight: the position of the weight among the op's arguments.
            prepack_id: as of :meth:`operator_action`. The operator may also take nothing of the weight.
            constants: bools, numbers, strings, dtypes or None.
        """
        return actions.Action(ActionKind.OPERATOR, weight, prepack_id, operator, constants)


@functools.lru_cache(maxsize=64)
def _plan_of(generation: int, backend: Backend, recipe: Recipe) -> Plan:
    plan: Plan = pkgutil.resolve_name(recipe.plan_class)(backend, recipe)
    return plan


@functools.lru_cache(maxsize=64)
def _plan_of_text(generation: int, backend: Backend, recipe: str) -> Plan:
    return Plan.of(backend, Recipe.of_text(recipe))


@disable_dynamo
def perform(op: str, device_type: str, args: Sequence[Any], checked: bool = False) -> Performed:
    """Compute an op by the recipe of this thread's region, with autocast off for it; see :meth:`.Plan.perform`."""
    override, cache = state.machine.innermost(device_type)
    plan = None if override is None else plan_of(override, device_type)
    return (None, None) if plan is None else plan.perform(op, args, cache, checked)


def plan_of(override: Override, device_type: str) -> Plan | None:
    """Return the plan of an override's recipe on a device; None if it has none."""
    backend = registry.find(device_type)
    plan: Plan | None = override.plan
    if plan is None or plan.backend is not backend or plan.generation != generation.number:
        if override.recipe is None:
            return None
        plan = override.plan = Plan.of(backend, override.recipe)
    return plan


def resolved(recipe: Recipe, device_type: str, measure: bool) -> Recipe:
    """Return what the recipe's method of this name does, or did before in this generation."""
    return _resolved(generation.number, torch.get_num_threads(), recipe, device_type, measure)


@functools.lru_cache(maxsize=64)
def _resolved(generation: int, threads: int, recipe: Recipe, device_type: str, measure: bool) -> Recipe:
    return recipe.resolved(device_type, measure)
