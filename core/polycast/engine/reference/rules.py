"""Autocast's semantics: for each policy, a pure function from a call to the call that is run in its place.

The reference engine runs that call, and ``explain`` describes it.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ...policy.cast_policy import CastPolicy
from ...policy.matching import IsEligible, Matching, Targets
from ...policy.schemas import (
    flatten_arguments,
    hidden_writes,
    optional_dtype,
    overload_with_dtype,
    written_arguments,
)
from ...torch_internals.dispatcher import OpOverload


class OpCall(NamedTuple):
    """A call of an op; its eligible tensors are cast to `dtype`, if it has one, or those that `targets` names.

    Those that it writes are not cast to `dtype`.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype | None = None
    targets: Sequence[Targets] = ()
    """The dtypes that arguments are cast to, in the order of the op's schema; empty: `dtype` holds for all."""
    missing: Collection[torch.dtype] = ()
    """The dtypes that the device has no kernel for."""
    only: int | None = None
    """The position of the only argument that is cast to `dtype`, in the order of the op's schema; None: all are."""

    def casts(self, position: int) -> bool:
        """Return whether the eligible tensors of an argument are cast to `dtype`."""
        return self.only in (None, position) and position not in written_arguments(self.op)


def is_eligible(value: object, device_type: str) -> bool:
    """Return whether autocast for a device may cast a value.

    As in torch (ATen/autocast_mode.h, ``is_eligible``): a floating-point tensor on the device that is not float64.
    """
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == device_type
    )


def tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the tensors among values, also those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


_matching_of = functools.cache(Matching)


def _lower(call: OpCall, fast: torch.dtype, is_eligible: IsEligible) -> OpCall:
    return call._replace(dtype=torch.float32 if fast in call.missing else fast)


def _lower_first(call: OpCall, fast: torch.dtype, is_eligible: IsEligible) -> OpCall:
    given = flatten_arguments(call.op, call.args, call.kwargs)
    written = written_arguments(call.op).union(hidden_writes(call.op)[0])
    with_eligible = (at for at, value in enumerate(given) if any(map(is_eligible, tensors_in([value]))))
    first = next((at for at in with_eligible if at not in written), None)
    return call if first is None else _lower(call, fast, is_eligible)._replace(only=first)


def _fp32_set_opt_dtype(call: OpCall, fast: torch.dtype, is_eligible: IsEligible) -> OpCall:
    if not is_eligible(_first(call)):
        return call
    position = optional_dtype(call.op)
    assert position is not None  # the policy was validated
    name = call.op._schema.arguments[position].name
    if position < len(call.args):
        if call.args[position] is None:
            return call._replace(args=(*call.args[:position], torch.float32, *call.args[position + 1 :]))
    elif call.kwargs.get(name) is None:
        return call._replace(kwargs={**call.kwargs, name: torch.float32})
    return call


def _fp32_append_dtype(call: OpCall, fast: torch.dtype, is_eligible: IsEligible) -> OpCall:
    overload = overload_with_dtype(call.op)
    assert overload is not None  # the policy was validated
    # Pass this overload's defaults, because the one with a dtype need not have them.
    names = [argument.name for argument in call.op._schema.arguments]
    given = dict(zip(names, flatten_arguments(call.op, call.args, call.kwargs), strict=True))
    dtype = torch.float32 if is_eligible(_first(call)) else given[names[0]].dtype
    return OpCall(overload, (), {**given, "dtype": dtype})


def _promote(call: OpCall, fast: torch.dtype, is_eligible: IsEligible) -> OpCall:
    """Cast to float32, which holds the values of any two dtypes below it, if the eligible tensors' dtypes differ."""
    dtypes = {tensor.dtype for tensor in tensors_in((*call.args, *call.kwargs.values())) if is_eligible(tensor)}
    return call._replace(dtype=torch.float32) if len(dtypes) > 1 else call


def _match(call: OpCall, fast: torch.dtype, is_eligible: IsEligible) -> OpCall:
    """Cast the operands that torch would refuse because their dtypes differ, or because it has no kernel for them."""
    given = flatten_arguments(call.op, call.args, call.kwargs)
    return call._replace(targets=_matching_of(call.op).targets(given, is_eligible, call.missing) or ())


def _first(call: OpCall) -> object:
    return call.args[0] if call.args else call.kwargs.get(call.op._schema.arguments[0].name)


RULES: dict[CastPolicy, Callable[[OpCall, torch.dtype, IsEligible], OpCall]] = {
    CastPolicy.LOWER_PRECISION_FP: _lower,
    CastPolicy.FP32: lambda call, *_: call._replace(dtype=torch.float32),
    CastPolicy.FP32_SET_OPT_DTYPE: _fp32_set_opt_dtype,
    CastPolicy.FP32_APPEND_DTYPE: _fp32_append_dtype,
    CastPolicy.PROMOTE: _promote,
    CastPolicy.LOWER_FIRST: _lower_first,
    CastPolicy.MATCH: _match,
    CastPolicy.PASSTHROUGH: lambda call, *_: call,
}
"""For each policy, the function that returns the call that is run in place of one, in a region with a fast dtype.

A call under BANNED is not run at all.
"""
