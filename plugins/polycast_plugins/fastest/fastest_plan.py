"""`FastestPlan`: the recipe `Fastest` on a device, which computes each call in the way that is the fastest."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from polycast import CastPolicy
from polycast.plugin import Backend, LowBitKernel, Plan, call_outside, decide, dtype_name, events, recipe_kernels

from .attention import RecordedAttention
from .choose_way import NO_FAST_KERNEL, Conversions, Way, choose, is_unsupported, name_of
from .device_profile import DeviceProfile
from .fastest_recipe import COMPOSED_OPS, POINTWISE_OPS, Fastest
from .recorded import NO_GRADIENTS, Recorded, recorded_call
from .recorded_ways import Ways, choose_recorded
from .workloads import Workload, size_hint, weight_position, workload_of

NO_PROFILE = "its profile is not loaded in this process"
UNKNOWN_SIZES = "the profile does not cover it: a vector, no elements, or complex factors"
TRACED_MASK = "its mask is boolean: inductor's code for such attention in float32 corrupts memory"
NARROW_WEIGHT = "its weight is not float32"
REGISTERED = "a policy is registered for an op of torch's, which it may call"
OTHER_OPS = "an op that it calls has another policy in the table, or a kernel of another library"
SAME_RESULTS = "the backend's kernel has the same results"
OTHER_DTYPE = "its input is not in the fast dtype"
COMPILED = "compilers make one kernel of it and the ops around it"
FEW_ROWS = "it has few rows: the ops that it calls are computed one by one"
_ROWS_OF_COMPOSED = 16
"""The least rows of an op that is computed as one. Of fewer, backends may have kernels for the ops that it calls."""
_MASK = 18
"""The position of a composed op's mask, after the weights. It has the dtype of the input."""
_RECURRENT = "aten::mkldnn_rnn_layer"
"""oneDNN has no kernel for it on some processors where its other kernels of the fast dtype run."""
_INNER_OPS = (
    *("aten::bmm", "aten::matmul", "aten::linear", "aten::gelu", "aten::relu"),
    *("aten::_masked_softmax", "aten::_softmax", "aten::softmax.int"),
)
"""The ops that those of a composed op call, outside of autocast."""
_OF_OTHERS = "a kernel that is not polycast's"
"""The rule of an `Explanation` for an op that another library has a kernel for."""
_UNKEPT = (Plan.INTERCEPTED, Plan.SUBCLASS, NO_PROFILE)
"""Reasons that may not hold for the next call with the same metadata."""


class OfferedKernel(NamedTuple):
    """A kernel that may compute an op, the distribution that supplies it, and the action that calls its operator."""

    kernel: LowBitKernel
    package: str
    action: Plan.Action | None


class FastestPlan(Plan):
    """The recipe on a device: chooses a way for each call, and computes it."""

    recipe: Fastest

    def __init__(self, backend: Backend, recipe: Fastest) -> None:
        super().__init__(backend, recipe)
        offers = {
            op: [
                OfferedKernel(each.kernel, each.package, self.operator_action(each.kernel, self.CACHED_CAST))
                for each in found
                if each.kernel.uses_cast
            ]
            for op, found in recipe_kernels(backend, recipe).items()
        }
        self._offered: Mapping[str, Sequence[OfferedKernel]] = {op: found for op, found in offers.items() if found}
        self.kernels = {op: found[0].kernel for op, found in self._offered.items()}

    @property
    def profile(self) -> DeviceProfile | None:
        """The recipe's profile; None while this process knows only its digest, as in compiled code from a cache."""
        profile: DeviceProfile | None = self.recipe.known("profile")
        return profile

    def _kernel_for(self, op: str, args: Sequence[Any]) -> OfferedKernel | str:
        """Return the first kernel of an op that has one that supports a call, or why none does."""
        reasons: dict[str, None] = {}
        for each in self._offered[op]:
            reason = each.kernel.unsupported_reason(*args)
            if reason is None:
                return each
            reasons[reason] = None
        return "; ".join(reasons)

    def _package_of(self, found: "PlannedCall", op: str, args: Sequence[Any]) -> str:
        """Return the distribution whose kernel computes a call; empty if torch's does."""
        kernel = self._kernel_for(op, args) if found.is_by_kernel else ""
        return "" if isinstance(kernel, str) else kernel.package

    @override
    def why_no_kernel(self, op: str) -> str | None:
        if op in COMPOSED_OPS and (reason := self._why_not_from_ops(op)) is not None:
            return reason
        if op in POINTWISE_OPS:
            return None if op in self.kernels else self.NO_KERNEL
        return None if self.profile is not None else NO_PROFILE

    @override
    def explain(
        self, op: str, args: Sequence[Any], cache: Plan.Cache | None, dtype: torch.dtype
    ) -> Plan.Computed | str:
        found = self.plan_call(op, args, cache, dtype)
        if isinstance(found, str):
            return found
        dtypes = {Way.FAST: dtype, Way.FLOAT32: torch.float32}
        package = self._package_of(found, op, args)
        return Plan.Computed(name_of(found.way, dtype), found.reason, dtypes.get(found.way), package)

    @override
    def perform(
        self, op: str, args: Sequence[Any], cache: Plan.Cache | None, checked: bool
    ) -> tuple[Any, Plan.Action | None]:
        dtype = torch.get_autocast_dtype(self.device_type)
        if not checked and self.is_intercepted():
            found: PlannedCall | str = self.INTERCEPTED
        else:
            found = self.plan_call(op, args, cache, dtype, checked)
        if isinstance(found, str):
            if op not in POINTWISE_OPS:  # which runs as without the recipe
                self.notify(op, found)
            return None, None if events.recipe_call or found in _UNKEPT else self.DECLINED
        if events.recipe_call:
            self.notify(op, None, name_of(found.way, dtype), self._package_of(found, op, args))
        result, action = self._compute(found, op, args, cache, dtype)
        return result, None if events.recipe_call else action

    def plan_call(
        self, op: str, args: Sequence[Any], cache: Plan.Cache | None, dtype: torch.dtype, checked: bool = False
    ) -> "PlannedCall | str":
        """Return the way to compute a call, or why there is no choice and it runs in the fast dtype.

        The arguments may be fake. If `checked`, the tensors need no check, nothing intercepts the op, and autograd does
        not record it.
        """
        if op in POINTWISE_OPS:
            return self._why_not_pointwise(op, args, dtype, checked) or PlannedCall(Way.KERNEL, SAME_RESULTS)
        profile = self.profile
        if profile is None and op != _RECURRENT:
            return NO_PROFILE
        if not checked:
            others = [arg for at, arg in enumerate(args) if not _is_mask(at, arg)]
            reason = self.unsupported_tensor(others, False)
            if reason is not None:
                return reason
            if not self.is_traced():  # tensors of subclasses are traced, too
                if any(isinstance(arg, torch.Tensor) and self.is_special(arg) and not arg.is_meta for arg in args):
                    return self.SUBCLASS
            elif len(others) < len(args):
                return TRACED_MASK
        runs_in_function = self.in_function()
        records = runs_in_function or (not checked and _is_recorded(args))
        if op == _RECURRENT and not _has_recurrent_kernel(dtype, records):
            return PlannedCall(Way.FLOAT32, NO_FAST_KERNEL)
        if profile is None:
            return NO_PROFILE
        workload = workload_of(op, args)
        if workload is None:
            return UNKNOWN_SIZES
        if workload.size < self.recipe.min_size:
            return self.SMALL
        if op in COMPOSED_OPS and (reason := self._why_not_as_one(op, workload, args)) is not None:
            return reason
        position = weight_position(op)
        if self.weight_of(args[position]) is not None and args[position].dtype is not torch.float32:
            return NARROW_WEIGHT
        if records:
            recorded = recorded_call(op, args, self.weight_of(args[position]) is not None, dtype)
            if recorded is None:
                has_none = is_unsupported(profile, workload.op, dtype_name(dtype))
                return PlannedCall(Way.FLOAT32, NO_FAST_KERNEL) if has_none else NO_GRADIENTS
            operands = recorded.operands(self.has_cast(args[position], cache), runs_in_function)
            ways = choose_recorded(profile, dtype, workload, operands)
            return PlannedCall(ways.forward, ways.reason, recorded, ways)
        conversions = self._conversions(args, cache)
        if op in COMPOSED_OPS:  # autocast does not convert the parameters of norms
            conversions = conversions._replace(more_to_fast=0)
        way, why = choose(profile, dtype, workload, conversions, self._ways_by_kernel(op, args, position, dtype))
        return why if op in COMPOSED_OPS and way is Way.FAST else PlannedCall(way, why)

    def _why_not_pointwise(self, op: str, args: Sequence[Any], dtype: torch.dtype, checked: bool) -> str | None:
        """Return why torch's kernel computes a pointwise op; None if one of the recipe's does."""
        if op not in self._offered:
            return self.NO_KERNEL
        if self.is_traced():
            return COMPILED
        if not checked and (reason := self.unsupported_tensor(args, False)) is not None:
            return reason
        x = args[0]
        if x.dtype is not dtype:
            return OTHER_DTYPE
        if not checked and self.is_special(x):
            return self.SUBCLASS
        found = self._kernel_for(op, args)
        return found if isinstance(found, str) else None

    def _why_not_as_one(self, op: str, workload: Workload, args: Sequence[Any]) -> str | None:
        """Return why a composed op is not computed as a whole, in any case; None if it may be."""
        if workload.rows < _ROWS_OF_COMPOSED:
            return FEW_ROWS
        weights = args[1:_MASK]
        if any(isinstance(arg, torch.Tensor) and arg.dtype in self.FLOATS - {torch.float32} for arg in weights):
            return NARROW_WEIGHT
        return self._why_not_from_ops(op)

    def _why_not_from_ops(self, op: str) -> str | None:
        """Return why a composed op is not computed as a whole, given what decides for the ops that it calls."""
        decided = [decide(each, self.device_type) for each in (op, *COMPOSED_OPS[op])]
        inner = (decide(each, self.device_type) for each in _INNER_OPS)
        if any(rule.startswith("register_op") for _, rule, _ in (*decided, *inner)):
            return REGISTERED
        policies = {policy for policy, _, _ in decided}
        if policies - {None, CastPolicy.LOWER_PRECISION_FP, CastPolicy.MATCH}:
            return OTHER_OPS
        has_kernels = policies != {None}  # otherwise all kernels are torch's, until the first region
        return OTHER_OPS if has_kernels and any(rule == _OF_OTHERS for _, rule, _ in decided) else None

    def _ways_by_kernel(self, op: str, args: Sequence[Any], position: int, dtype: torch.dtype) -> tuple[Way, ...]:
        """Return the ways by the kernel of an op, if it supports a call."""
        if op not in self._offered or args[position].dtype is not torch.float32 or dtype is torch.float32:
            return ()  # a program may set float32 as the fast dtype
        found = self._kernel_for(op, args)
        if isinstance(found, str):
            return ()
        return (Way.KERNEL, Way.FLOAT32_KERNEL) if found.kernel.takes_float32 else (Way.KERNEL,)

    def _conversions(self, args: Sequence[Any], cache: Plan.Cache | None) -> Conversions:
        """Return the elements to convert."""
        narrow, wide, weight = [], [], []
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.dtype in self.FLOATS:
                elements = size_hint(arg.numel())
                if arg.dtype is not torch.float32:
                    narrow.append(elements)
                elif self.weight_of(arg) is None:
                    wide.append(elements)
                elif not self.has_cast(arg, cache):
                    weight.append(elements)
        more_to_fast = max(len(wide) - 1, 0) + max(len(weight) - 1, 0)
        return Conversions(sum(narrow), sum(wide), sum(weight), more_to_fast, max(len(narrow) - 1, 0))

    def _compute(
        self, found: "PlannedCall", op: str, args: Sequence[Any], cache: Plan.Cache | None, dtype: torch.dtype
    ) -> tuple[Any, Plan.Action | None]:
        ways = found.ways if found.recorded is not None and _is_recorded(args) else None
        if found.recorded is not None and ways is not None and not ways.are_all_fast:
            result = found.recorded.compute(ways, dtype, lambda weight: self.cast_of(weight, dtype, cache))
            return result, found.recorded.native_action(ways, dtype)
        if found.way is Way.FLOAT32:
            return _cast_results(self.in_dtype(op, args, torch.float32), dtype), self.FLOAT32
        if found.is_by_kernel:
            offered = self._kernel_for(op, args)
            assert not isinstance(offered, str)  # it was the reason for the way
            kernel, _, action = offered
            weight = args[kernel.weight]
            if found.way is Way.KERNEL:
                weight = self.cast_of(weight, dtype, cache)
            elif action is not None:
                action = action._replace(prepack_id=self.AS_IT_IS)
            result = kernel.run((weight,), *args)
            return _cast_results(result, dtype), action
        return None, self.DECLINED


class PlannedCall(NamedTuple):
    """The way to compute a call, or its forward, and why.

    Attributes:
        way, reason: as of a `ChosenWay`.
        recorded: the product, if autograd records it or an autograd.Function runs it.
        ways: the ways of its forward and its gradients.
    """

    way: Way
    reason: str
    recorded: Recorded | RecordedAttention | None = None
    ways: Ways | None = None

    @property
    def is_by_kernel(self) -> bool:
        """Whether a kernel for the recipe computes it."""
        return self.way in (Way.KERNEL, Way.FLOAT32_KERNEL)


_ONEDNN_CHECKS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


@functools.cache
def onednn_supports(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has kernels for a fast dtype on this processor; true if this torch does not say."""
    ask = getattr(torch.ops.mkldnn, _ONEDNN_CHECKS.get(dtype, ""), None)
    return ask is None or bool(ask())


def _has_recurrent_kernel(dtype: torch.dtype, records: bool) -> bool:
    """Return whether torch has the kernel of a recurrent layer for a fast dtype, which in float16 has no backward."""
    return call_outside(onednn_supports, dtype) and not (records and dtype is torch.float16)


def _is_mask(position: int, arg: Any) -> bool:
    """Return whether an argument is the boolean mask of an attention, which is not converted."""
    return position > 2 and isinstance(arg, torch.Tensor) and arg.dtype is torch.bool


def _is_recorded(args: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)


def _cast_results(results: Any, dtype: torch.dtype) -> Any:
    """Return what an op returned, with floating-point numbers in a dtype."""
    if isinstance(results, torch.Tensor):
        return results.to(dtype)
    return tuple(each if each is None or not each.is_floating_point() else each.to(dtype) for each in results)
