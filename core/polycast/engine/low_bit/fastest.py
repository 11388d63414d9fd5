"""`FastestPlan`: the recipe `Fastest` on a device, which computes each call in the way that is the fastest."""

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from ...plugins.backend import Backend, LowBitKernel
from ...policy.recipe import Fastest
from ...policy.schemas import find_op, unflatten_arguments
from ...torch_internals.names import are_functorch_transforms_active, is_forward_ad_active, is_tracing
from ..casts.cached_cast import number_in_graph
from ..casts.not_prepacked import INTERCEPTED
from ..casts.weight_cache import WeightCache
from ..casts.weights import caching_is_safe, is_all_of, is_dense, parameter_of
from ..fastest.choice import Choice, Conversions, Way, choose, name_of
from ..fastest.products import product_of, weight_position
from ..inference import in_function
from .actions import FALL_BACK, FLOAT32, Action, ActionKind
from .listeners import listeners, notify
from .plan import FLOATS, RECORDS, SMALL, SUBCLASS, Plan, is_special

NO_PROFILE = "its profile is not known in this process"
UNKNOWN_SIZES = "the profile has nothing like it (a vector, or no elements)"
NARROW_WEIGHT = "its weight is not float32"


class FastestPlan(Plan):
    """The recipe on a device: chooses a way for each call, and computes it."""

    recipe: Fastest

    def __init__(self, backend: Backend, recipe: Fastest) -> None:
        super().__init__(backend, recipe)
        self.kernels = {op: kernel for op, kernel in self.kernels.items() if kernel.uses_cast}
        self.ops = recipe.overloads
        self.profile = None if isinstance(recipe.profile, str) else recipe.profile

    @override
    def _action(self, op: str, kernel: LowBitKernel) -> Action | None:
        if kernel.operator is None or self._may_capture:
            return None
        return Action(ActionKind.OPERATOR, kernel.weight, 0, kernel.operator, tuple(kernel.constants))

    @override
    def why_no_kernel(self, op: str) -> str | None:
        return None if self.profile is not None else NO_PROFILE

    @override
    def why_not(self, op: str, args: Sequence[Any]) -> str | None:
        found = self.choice(op, args, None, torch.get_autocast_dtype(self.device_type))
        return found if isinstance(found, str) else None

    def perform(
        self, op: str, args: Sequence[Any], cache: WeightCache | None, plain: bool
    ) -> tuple[torch.Tensor | None, Action | None]:
        """Compute an op, and notify listeners; see ``compute.perform``."""
        dtype = torch.get_autocast_dtype(self.device_type)
        if not plain and (is_forward_ad_active() or are_functorch_transforms_active() or is_tracing()):
            found: Choice | str = INTERCEPTED
        else:
            found = self.choice(op, args, cache, dtype, plain)
        if isinstance(found, str):
            notify(self.device_type, self.recipe.short, op, found)
            return None, FALL_BACK if plain and not listeners else None
        notify(self.device_type, f"{self.recipe.short}:{name_of(found.way, dtype)}", op, None)
        result, action = self._compute(found.way, op, args, cache, dtype)
        return result, None if listeners else action

    def choice(
        self, op: str, args: Sequence[Any], cache: WeightCache | None, dtype: torch.dtype, plain: bool = False
    ) -> Choice | str:
        """Return the way to compute a call, or why there is no choice and it runs in the fast dtype.

        Args:
            op: by its name in the dispatcher.
            args: its arguments, which may be fake.
            cache: the region's.
            dtype: the fast dtype.
            plain: skip the checks of single tensors, which the caller has made.
        """
        if self.profile is None:
            return NO_PROFILE
        if not plain:
            reason = self._unsupported_tensor(args)
            if reason is not None and reason != RECORDS:
                return reason
            special = any(isinstance(arg, torch.Tensor) and is_special(arg) and not arg.is_meta for arg in args)
            if special and caching_is_safe():  # traced tensors are of subclasses too, but caching is not safe then
                return SUBCLASS
            if reason is RECORDS or in_function():
                return RECORDS
        product = product_of(op, args)
        if product is None:
            return UNKNOWN_SIZES
        if product.size < self.recipe.min_size:
            return SMALL
        position = weight_position(op)
        conversions = self._conversions(args, position, cache)
        if conversions is None:
            return NARROW_WEIGHT
        kernel = self.kernels.get(op)
        has_kernel = (
            kernel is not None and args[position].dtype is torch.float32 and not kernel.unsupported_reason(*args)
        )
        return choose(self.profile, dtype, product, conversions, has_kernel)

    def _conversions(self, args: Sequence[Any], position: int, cache: WeightCache | None) -> Conversions | None:
        """Return the elements to convert; None if the weight is not float32."""
        narrow = wide = weight = 0
        for at, arg in enumerate(args):
            if not isinstance(arg, torch.Tensor):
                continue
            elements = arg.numel() if isinstance(arg.numel(), int) else 0
            parameter = parameter_of(arg) if at == position else None
            if parameter is not None and arg.dtype is not torch.float32:
                return None
            if arg.dtype is not torch.float32:
                narrow += elements
            elif parameter is None:
                wide += elements
            elif cache is None or not torch.is_autocast_cache_enabled() or not is_all_of(arg, parameter):
                weight += elements
        return Conversions(narrow, wide, weight)

    def _compute(
        self, way: Way, op: str, args: Sequence[Any], cache: WeightCache | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor | None, Action | None]:
        if way is Way.FLOAT32:
            return _in_float32(op, args).to(dtype), FLOAT32
        if way is Way.KERNEL:
            kernel = self.kernels[op]
            result = kernel.run((_cached_cast(args[kernel.weight], dtype, cache),), *args)
            return result if result.dtype is dtype else result.to(dtype), self._actions[op]
        return None, FALL_BACK


def _in_float32(op: str, args: Sequence[Any]) -> torch.Tensor:
    overload = find_op(op)
    assert overload is not None  # it was called
    converted = [arg.float() if isinstance(arg, torch.Tensor) and arg.dtype in FLOATS else arg for arg in args]
    positional, named = unflatten_arguments(overload, converted)
    result: torch.Tensor = overload(*positional, **named)
    return result


def _cached_cast(weight: torch.Tensor, dtype: torch.dtype, cache: WeightCache | None) -> torch.Tensor:
    """Return the cast of a weight, from the region's cache; for a view of all of it, a view of that."""
    parameter = parameter_of(weight)
    if parameter is None or cache is None or not is_all_of(weight, parameter) or not is_dense(parameter):
        return weight.to(dtype)
    cast: torch.Tensor = torch.ops.polycast.cached_cast(parameter, dtype, number_in_graph(cache))
    return cast if weight is parameter else cast.as_strided(weight.shape, weight.stride(), 0)
