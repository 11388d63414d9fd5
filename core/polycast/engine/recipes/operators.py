"""``polycast::low_bit_...``: operators in compiled code for ops that a recipe computes.

Each takes the arguments of its op, the recipe, the number of a cache (0: the one of this thread's region), the dtype,
and the layout of a view. When it runs, it looks up the kernel, and the prepacked weight in that cache. Where this
thread's region has the recipe, the native engine computes the op as eager code does: see native/recipe_op.h.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.library import Library

from ...common import generation
from ...common.atfork import fork_safe_lock
from ...policy.schemas import existing_op
from ...registry.backend import Backend
from ...registry.registry import registry
from ...torch_internals.dispatcher import disable_autocast, tracking_views
from ...torch_internals.private_names import disable_dynamo
from .. import state
from ..casts.cached_cast import TAGS, number_in_graph
from ..casts.cast_cache import CastCache, caches_alive
from ..casts.weights import parameter_of
from .in_dtype import in_dtype
from .prepacking import INTERCEPTED, NO_WEIGHT

_lock = fork_safe_lock()


def traced(
    op: str, plan: Any, args: Sequence[Any], cache: CastCache | None, find: Callable[[int, Backend, str], Any]
) -> torch.Tensor | str:
    """Call the operator of an op in traced code; return its result, or why the recipe declines it.

    Args:
        op, plan, args, cache: see `Plan.in_graph`.
        find: returns the plan of a generation, a backend and the text of a recipe: the code may run in another process.
    """
    if torch.compiler.is_exporting():
        return INTERCEPTED
    position = plan.kernels[op].weight
    weight = args[position]
    parameter = parameter_of(weight)
    if parameter is None:
        return NO_WEIGHT
    layout: list[int] = []
    if parameter is not weight:
        # Compiled code loses the link from a view to its parameter: the operator makes the view again.
        args = (*args[:position], parameter, *args[position + 1 :])
        layout = [position, weight.storage_offset(), *weight.shape, *weight.stride()]
    dtype = torch.get_autocast_dtype(plan.device_type)
    with _lock:
        operator = _operator_of(op, find, state.machine)
    result: torch.Tensor = operator(*args, plan.recipe.text, number_in_graph(cache), dtype, layout)
    return result


def _with_view(args: Sequence[Any], layout: Sequence[int] = ()) -> Sequence[Any]:
    """Return the arguments of an op with the parameter replaced by a view of it."""
    if not layout:
        return args
    position, offset, *sizes_and_strides = layout
    half = len(sizes_and_strides) // 2
    # Compiled code may run below the key at which autograd tracks views.
    with tracking_views():
        view = args[position].as_strided(sizes_and_strides[:half], sizes_and_strides[half:], offset)
    return (*args[:position], view, *args[position + 1 :])


@functools.cache
def _operator_of(op: str, find: Callable[[int, Backend, str], Any], machine: state.StateMachine) -> Any:
    """Define the operator of an op, have the engine register its kernel, and return it. The lock must be held."""
    name, run = _define(op, find)
    machine.register_recipe_op(f"polycast::{name}", op, run)
    return getattr(torch.ops.polycast, name).default


@functools.cache
def _define(op: str, find: Callable[[int, Backend, str], Any]) -> tuple[str, Callable[..., torch.Tensor]]:
    """Define the operator of an op; return its name and its Python function."""
    overload = existing_op(op)
    name = "low_bit_" + op.replace("::", "_").replace(".", "_")
    arguments, _, returns = str(overload._schema).partition("(")[2].rpartition(") -> ")
    arguments = re.sub(r"=(\[[^]]*\]|[^,]*)", "", arguments.replace("*, ", ""))  # no defaults
    schema = f"{name}({arguments}, str recipe, int cache, ScalarType dtype, int[] view=[]) -> {returns}"
    _library.define(schema, tags=TAGS)  # type: ignore[no-untyped-call]

    count = len(overload._schema.arguments)

    @disable_dynamo
    def run(*args: Any) -> torch.Tensor:
        recipe, cache, dtype, *layout = args[count:]  # torch omits defaults
        device_type = next(arg for arg in args if isinstance(arg, torch.Tensor)).device.type
        plan = find(generation.number, registry.find(device_type), recipe)
        return _run_in_compiled(op, plan, _with_view(args[:count], *layout), cache, dtype)

    def fake(*args: Any) -> torch.Tensor:
        _, _, dtype, *layout = args[count:]
        result: torch.Tensor = in_dtype(op, _with_view(args[:count], *layout), dtype)
        return result

    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _library.impl(name, fake, "Meta")  # type: ignore[no-untyped-call]
    return name, run


_library = Library("polycast", "FRAGMENT")  # type: ignore[no-untyped-call]


def _run_in_compiled(op: str, plan: Any, args: Sequence[Any], cache: int, dtype: torch.dtype) -> torch.Tensor:
    device_type = plan.device_type
    found = caches_alive.get(cache) if cache else state.machine.innermost(device_type)[1]
    before = torch.get_autocast_dtype(device_type)
    if before is not dtype:
        torch.set_autocast_dtype(device_type, dtype)
    try:
        with disable_autocast(), torch.no_grad():
            result: torch.Tensor | str = plan.compute(op, args, found)
        if not isinstance(result, str):
            return result
        with disable_autocast():  # again: a listener may have entered a region
            computed: torch.Tensor = in_dtype(op, args, dtype)
        return computed
    finally:
        if before is not dtype:
            torch.set_autocast_dtype(device_type, before)
