"""Ops that a recipe computes: what the kernels at the Autocast keys call where a region has one.

`perform` finds the backend's kernel for the op, and what the weight is packed into; or says why the op runs in the fast
dtype, to whoever counts. What weights are packed into is kept by the rules of a WeightCache: in the region's, or in one
for the process, for to pack anew at each entry would cost more than it gives.

Where a compiler traces a region, an op that a kernel takes becomes an operator of polycast's, ``polycast::low_bit_...``
with the schema of the op. It does at run time what `perform` does, and finds the packing there.
"""

import functools
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.library import Library
from torch.nn.modules import module
from torch.utils._python_dispatch import _disable_current_modes

from ..plugins.backend import Backend, LowBitKernel
from ..plugins.discovery import check_recipe
from ..plugins.registry import registry
from ..policy.recipes import Recipe
from ..policy.schemas import by_schema, find_op
from . import state
from .disable_dynamo import disable_dynamo
from .kept_cast import TAGS, number_in_graph
from .state import NO_WEIGHT, NOTHING_KEPT, WATCHED, Overlay
from .weight_cache import WeightCache, cache_by_identity
from .weights import caching_is_safe

NO_KERNEL = "the backend has no kernel for it"
RECORDS = "autograd records it, and low bit is for inference"
SMALL = "the weight is smaller than the recipe's min_size"
KEPT = "the recipe keeps the weight in the fast dtype"
NO_PACKING = "the weight cannot be packed"
IN_FUNCTION = "an autograd.Function computes it, and low bit is for inference (what torch.inference_mode() says)"
SUBCLASS = "a tensor is of a subclass that sees each op itself, or has no memory"

_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
_PLAIN = (torch.Tensor, torch.nn.Parameter)

_Note = Callable[[str, str, str, str | None], object]
_listeners: tuple[tuple[_Note, int | None], ...] = ()
_lock = threading.Lock()
_kinds: list[tuple[weakref.ref[Backend], dict[Hashable, int]]] = []
"""The kinds of packings, of each backend: one by one, for another instance of its class may pack otherwise."""
_unused_kinds = itertools.count(1)


def listen(note: _Note, thread: int | None) -> None:
    """Have a function told of each op that is computed by a recipe, or is not: of one thread, or of all.

    It gets the device type, the recipe, the op, by its name in the dispatcher, and the reason if it is not.
    """
    global _listeners
    with _lock:
        _listeners = (*_listeners, (note, thread))


def listen_no_more(note: _Note) -> None:
    """Have it told no more."""
    global _listeners
    with _lock:
        _listeners = tuple(each for each in _listeners if each[0] != note)


def _tell(device_type: str, recipe: Recipe, op: str, reason: str | None) -> None:
    if not _listeners or TracingContext.try_get() is not None:
        return
    thread = threading.get_ident()
    for note, of in _listeners:
        if of in (None, thread):
            note(device_type, recipe.short, op, reason)


class _Packings:
    """What weights are packed into where no region around has a cache: kept for the process, as long as they live."""

    def __init__(self) -> None:
        self._cache: WeightCache | None = None

    @property
    def cache(self) -> WeightCache:
        found = self._cache
        if found is None:
            found = self._cache = WeightCache()
        return found

    def clear(self) -> None:
        """Drop all, and what refers to weights: ``torch.utils.swap_tensors`` refuses those that anybody refers to."""
        found = self._cache
        if found is not None:
            found.clear()
        for keep in list(_all_keeps):
            keep.forget()

    def drop(self) -> None:
        """Drop all, and take back what is in torch."""
        self._cache = None
        _parameters.unwatch()


class _Parameters:
    """Counts how often any module is given a parameter or a module, while it is watched."""

    def __init__(self) -> None:
        self.given = 0
        self._hooks: list[Any] = []

    def watch(self) -> None:
        if not self._hooks:
            self.given += 1  # what was not seen until now may have been one
            self._hooks = [
                module.register_module_parameter_registration_hook(self._count),
                module.register_module_module_registration_hook(self._count),
            ]

    def unwatch(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _count(self, *_: object) -> None:
        self.given += 1


packings = _Packings()
_parameters = _Parameters()


class _Thread(threading.local):
    forward: tuple[int, bool] | None = None
    """Where a forward runs again in a backward: which backward, and whether a function of autograd's ran it first."""


_thread = _Thread()


def in_function() -> bool:
    """Say whether a function of autograd's computes now, forward or backward, so that gradients may come of it.

    Its forward runs without a graph, as inference does. But there autograd switches off forward mode too, which else
    only inference mode does.
    """
    if not torch._C._is_fwd_grad_enabled():
        return not torch.is_inference_mode_enabled()
    backward = torch._C._current_graph_task_id()
    if _thread.forward is not None and _thread.forward[0] == backward:
        return _thread.forward[1]
    return backward != -1


@contextmanager
def as_in_forward(in_function: bool) -> Iterator[None]:
    """Have what a backward runs again computed as its forward was, in a function of autograd's or not."""
    before = _thread.forward
    _thread.forward = torch._C._current_graph_task_id(), in_function
    try:
        yield
    finally:
        _thread.forward = before


class _Keep:
    """The weights that a recipe keeps in the fast dtype: those that it names, and those of modules that it names."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._given = 0
        self._answers: dict[int, tuple[weakref.ref[torch.Tensor], bool]] = {}
        _all_keeps.add(self)

    def forget(self) -> None:
        self._answers = {}

    def has(self, weight: torch.Tensor) -> bool:
        _parameters.watch()
        if self._given != _parameters.given:
            self._given = _parameters.given
            self.forget()
        known = self._answers.get(id(weight))
        if known is not None and known[0]() is weight:
            return known[1]
        found = any(
            each is weight if isinstance(each, torch.Tensor) else any(own is weight for own in each.parameters())
            for each in self._recipe.keep
        )
        if len(self._answers) > 10_000:
            self._answers = {}
        self._answers[id(weight)] = weakref.ref(weight), found
        return found


_all_keeps: "weakref.WeakSet[_Keep]" = weakref.WeakSet()


class _Plan:
    """The kernels of a backend for a recipe."""

    def __init__(self, backend: Backend, recipe: Recipe) -> None:
        self.backend = backend
        self.recipe = recipe
        self._min_size = recipe.min_size
        self.device_type = backend.device_type
        self.keep = _Keep(recipe) if recipe.keep else None
        overridden = type(backend).is_capturing is not Backend.is_capturing or "is_capturing" in vars(backend)
        accelerator = torch.accelerator.current_accelerator()
        self._may_capture = overridden or (accelerator is not None and accelerator.type == backend.device_type)
        self.kernels: Mapping[str, LowBitKernel] = {}
        self.refusal = NO_KERNEL
        answer = check_recipe(backend, recipe)
        if answer.available:
            with _disable_current_modes(), torch.inference_mode(False):  # kernels may make tensors, to keep them
                self.kernels = backend.low_bit_kernels(recipe)
        else:
            self.refusal = answer.reason
        self._kinds = {op: _kind_of(backend, recipe, op, kernel) for op, kernel in self.kernels.items()}
        self._prepare = {op: _preparing(kernel) for op, kernel in self.kernels.items()}

    def declines(self, op: str, args: Sequence[Any]) -> str | None:
        """Say why an op is not computed by the recipe; None: it is, if its weight can be packed."""
        kernel = self.kernels.get(op)
        if kernel is None:
            return self.refusal
        records = torch.is_grad_enabled()
        for arg in args:
            if isinstance(arg, torch.Tensor):
                if arg.device.type != self.device_type and not arg.is_meta:
                    return f"a tensor is on {arg.device.type}"
                if arg.dtype not in _FLOATS:
                    return f"a tensor is {str(arg.dtype).removeprefix('torch.')}"
                if arg.layout is not torch.strided or arg.is_nested:
                    return "a tensor is not strided"
                if records and arg.requires_grad:
                    return RECORDS
        return self._declines_plain(kernel, args)

    def _declines_plain(self, kernel: LowBitKernel, args: Sequence[Any]) -> str | None:
        weight = args[kernel.weight]
        if not isinstance(weight, torch.Tensor):
            return "its weight is no tensor"
        if weight.numel() < self._min_size:
            return SMALL
        if self.keep is not None and self.keep.has(weight):
            return KEPT
        return kernel.declines(*args)

    def compute(
        self, op: str, args: Sequence[Any], cache: WeightCache | None, plain: bool = False
    ) -> torch.Tensor | str:
        """Return what a kernel makes of an op, or why none does."""
        kernel = self.kernels.get(op)
        if kernel is None:
            return self.refusal
        reason = self._declines_plain(kernel, args) if plain else self.declines(op, args)
        if reason is not None:
            return reason
        weight: torch.Tensor = args[kernel.weight]
        if self._may_capture and self.backend.is_capturing():
            return NOTHING_KEPT
        # What a compiler traces is of subclasses, too.
        if not plain and any(isinstance(arg, torch.Tensor) and _is_special(arg) for arg in args) and caching_is_safe():
            return SUBCLASS
        where = packings.cache if cache is None else cache
        prepared = state.machine.packing(where, weight, self._kinds[op], self._prepare[op])
        if prepared is None:
            return NO_PACKING
        if isinstance(prepared, str):
            return prepared
        result = kernel.run(prepared, *args)
        dtype = torch.get_autocast_dtype(self.device_type)
        return result if result.dtype is dtype else result.to(dtype)


def _preparing(kernel: LowBitKernel) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...] | None]:
    """Return what packs a weight, so that it may serve anywhere."""

    def prepare(weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        with torch.inference_mode(False), torch.no_grad():
            packed = kernel.prepare(weight.detach())
            if isinstance(packed, torch.Tensor):  # which is a sequence too
                raise TypeError(f"{type(kernel).__name__}.prepare must return a tuple of tensors or None, got a tensor")
            return tuple(packed or ()) or None

    return prepare


def _kind_of(backend: Backend, recipe: Recipe, op: str, kernel: LowBitKernel) -> int:
    # Each region may have a recipe of its own that equals the last one's, with kernels of its own.
    alone = (recipe.text.partition(" #")[0], op)
    packing = alone if kernel.packing is None else (recipe.kind, recipe.scales, kernel.packing)
    with _lock:
        _kinds[:] = [known for known in _kinds if known[0]() is not None]
        kinds = next((kinds for of, kinds in _kinds if of() is backend), None)
        if kinds is None:
            kinds = {}
            _kinds.append((weakref.ref(backend), kinds))
        return kinds.setdefault(packing, next(_unused_kinds))


def _is_special(tensor: torch.Tensor) -> bool:
    if type(tensor) in _PLAIN:
        return tensor.is_meta
    return tensor.is_meta or torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


def plan_of(overlay: Overlay, device_type: str) -> _Plan | None:
    """Return the kernels by which a region with an overlay computes on a device; None where it has no recipe."""
    backend = registry.find(device_type)
    plan: _Plan | None = overlay.derived.get(device_type)
    if plan is None or plan.backend is not backend:
        if overlay.recipe is None:
            return None
        plan = overlay.derived[device_type] = _plan(backend, overlay.recipe)
    return plan


def _plan(backend: Backend, recipe: Recipe) -> _Plan:
    plan: _Plan | None = recipe.derived.get(backend.device_type)
    if plan is None or plan.backend is not backend:
        plan = recipe.derived[backend.device_type] = _Plan(backend, recipe)
    return plan


@disable_dynamo
def perform(op: str, device_type: str, args: Sequence[Any], plain: bool = False) -> torch.Tensor | None:
    """Compute an op by the recipe of this thread's region; None where it is to run in the fast dtype.

    Called by kernels at the Autocast key, outside of autocast for the device.

    Args:
        op: by its name in the dispatcher.
        args: all that the op takes, in the order of its schema.
        plain: whether it is known already that the tensors are such as :meth:`_Plan.declines` looks for, that nothing
            watches the ops, and that autograd has nothing to record.
    """
    region = state.machine.innermost(device_type)
    if region is None or region[0] is None:
        return None
    cache = region[1]
    plan = plan_of(region[0], device_type)
    if plan is None:
        return None
    result: torch.Tensor | str
    if in_function():
        result = IN_FUNCTION
    elif not plain and (
        forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    ):
        result = WATCHED
    else:
        result = plan.compute(op, args, cache, plain)
        if result is WATCHED:
            result = _traced(op, plan, args, cache)
            if isinstance(result, torch.Tensor):
                return result  # the operator tells of itself, where it runs
    if isinstance(result, torch.Tensor):
        _tell(device_type, plan.recipe, op, None)
        return result
    _tell(device_type, plan.recipe, op, result)
    return None


def _traced(op: str, plan: _Plan, args: Sequence[Any], cache: WeightCache | None) -> torch.Tensor | str:
    """Return what stands for the op's result in what is traced, or why there is none."""
    if torch.compiler.is_exporting():
        return WATCHED
    weight = args[plan.kernels[op].weight]
    if not isinstance(_unwrapped(weight), torch.nn.Parameter):
        return NO_WEIGHT
    dtype = torch.get_autocast_dtype(plan.device_type)
    result: torch.Tensor = operator_of(op)(*args, plan.recipe.text, number_in_graph(cache), dtype)
    return result


def _unwrapped(weight: torch.Tensor) -> torch.Tensor:
    elem = getattr(weight, "elem", None)
    return torch._from_functional_tensor(elem) if elem is not None and torch._is_functional_tensor(elem) else weight


@functools.cache
def operator_of(op: str) -> Any:
    """Return the operator that stands for an op in compiled code, which finds the packing of the weight at run time."""
    overload = _op(op)
    name = "low_bit_" + op.replace("::", "_").replace(".", "_")
    arguments, _, returns = str(overload._schema).partition("(")[2].rpartition(") -> ")
    arguments = re.sub(r"=(\[[^]]*\]|[^,]*)", "", arguments.replace("*, ", ""))  # all of them are given, by position
    schema = f"{name}({arguments}, str recipe, int cache, ScalarType dtype) -> {returns}"
    _library.define(schema, tags=TAGS)  # type: ignore[no-untyped-call]

    @disable_dynamo
    def run(*args: Any) -> torch.Tensor:
        *of_op, recipe, cache, dtype = args
        return _run_in_compiled(op, of_op, recipe, cache, dtype)

    def fake(*args: Any) -> torch.Tensor:
        *of_op, _, _, dtype = args
        return _in_fast_dtype(op, of_op, dtype)

    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _library.impl(name, fake, "Meta")  # type: ignore[no-untyped-call]
    return getattr(torch.ops.polycast, name).default


_library = Library("polycast", "FRAGMENT")  # type: ignore[no-untyped-call]
_recipe_of_text = functools.lru_cache(maxsize=256)(Recipe.of_text)


def _run_in_compiled(op: str, args: Sequence[Any], recipe: str, cache: int, dtype: torch.dtype) -> torch.Tensor:
    device_type = next(arg for arg in args if isinstance(arg, torch.Tensor)).device.type
    plan = _plan(registry.find(device_type), _recipe_of_text(recipe))
    region = None if cache else state.machine.innermost(device_type)
    found = cache_by_identity(cache) if region is None else region[1]
    before = torch.get_autocast_dtype(device_type)
    if before is not dtype:
        torch.set_autocast_dtype(device_type, dtype)
    try:
        with torch._C._DisableAutocast():
            if torch.is_grad_enabled():
                with torch.no_grad():
                    result = plan.compute(op, args, found)
            else:
                result = plan.compute(op, args, found)
            if isinstance(result, torch.Tensor):
                _tell(device_type, plan.recipe, op, None)
                return result
            _tell(device_type, plan.recipe, op, result)
            return _in_fast_dtype(op, args, dtype)
    finally:
        if before is not dtype:
            torch.set_autocast_dtype(device_type, before)


def _in_fast_dtype(op: str, args: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    cast = [arg.to(dtype) if isinstance(arg, torch.Tensor) and arg.dtype in _FLOATS else arg for arg in args]
    positional, named = by_schema(_op(op), cast)
    result: torch.Tensor = _op(op)(*positional, **named)
    return result


@functools.cache
def _op(name: str) -> torch._ops.OpOverload:
    found = find_op(name)
    assert found is not None  # it was called
    return found


def why_no_kernel(overlay: Overlay, op: str, device_type: str) -> str | None:
    """Say why no call of an op would be computed by the recipe: there is no kernel; None: there is one."""
    plan = plan_of(overlay, device_type)
    return NO_KERNEL if plan is None else None if op in plan.kernels else plan.refusal


def why_not(overlay: Overlay, op: str, device_type: str, args: Sequence[Any]) -> str | None:
    """Say why a call would not be computed by the recipe, of arguments that may be fake; None: it would be."""
    plan = plan_of(overlay, device_type)
    if plan is None or op not in plan.kernels:
        return why_no_kernel(overlay, op, device_type)
    weight = args[plan.kernels[op].weight]
    if isinstance(weight, torch.Tensor) and not (weight.is_meta or isinstance(weight, torch.nn.Parameter)):
        return NO_WEIGHT
    return plan.declines(op, args)
