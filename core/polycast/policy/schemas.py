"""The ops of the running torch: look one up by name, query its schema, and check which policies it can have."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..torch_internals.dispatcher import OpOverload, OpOverloadPacket, find_schema_or_throw
from .cast_policy import CastPolicy

COMPOSED_OPS = frozenset(("aten::_transformer_encoder_layer_fwd",))
"""Ops without a policy that get a kernel on each device: the ops that they call are autocast, and a recipe may compute
them as a whole."""


def find_op(name: str) -> OpOverload | None:
    """Return the overload of a dispatcher name such as ``"aten::norm.Scalar"``, or None if torch lacks it."""
    qualified, _, overload = name.partition(".")
    namespace, _, base = qualified.partition("::")
    try:
        find_schema_or_throw(qualified, overload)
    except RuntimeError:
        return None
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    return found


def existing_op(name: str) -> OpOverload:
    """Return the overload of a dispatcher name; raise RuntimeError if torch has none."""
    found = find_op(name)
    if found is None:  # its library was destroyed
        raise RuntimeError(f"Could not find schema for {name}")
    return found


def find_overloads(qualified: str) -> list[str]:
    """Return the dispatcher names of the overloads of an op such as ``"aten::norm"``.

    Overloads for named dimensions, which torch has up to 2.12, are left out: they call the others.
    """
    namespace, _, base = qualified.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), base, None)
    if not isinstance(packet, OpOverloadPacket):
        return []  # a namespace has other attributes too
    names: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    qualified_names = (qualified if name == "default" else f"{qualified}.{name}" for name in names)
    return [name for name in qualified_names if (op := find_op(name)) is not None and not has_named_dimensions(op)]


@functools.cache
def has_named_dimensions(op: OpOverload) -> bool:
    """Return whether an overload takes dimensions by name, as strings."""
    return any(argument.name == "dim" and "str" in str(argument.real_type) for argument in op._schema.arguments)


_HIDDEN_WRITES = {
    "aten::_batch_norm_impl_index": "training",
    "aten::batch_norm": "training",
    "aten::batch_norm_gather_stats": None,
    "aten::batch_norm_gather_stats_with_counts": None,
    "aten::batch_norm_update_stats": None,
    "aten::cudnn_batch_norm": "training",
    "aten::instance_norm": "use_input_stats",
    "aten::miopen_batch_norm": "training",
    "aten::native_batch_norm": "training",
}
"""The functional ops that write running statistics, which their schemas do not declare, and the flag that says so."""


@functools.cache
def hidden_writes(op: OpOverload) -> tuple[tuple[int, ...], int]:
    """Return the positions of the arguments that a functional op writes, and of the flag that says so, or -1."""
    if op._schema.name not in _HIDDEN_WRITES or op._schema.is_mutable:
        return (), -1
    names = [argument.name for argument in op._schema.arguments]
    flag = _HIDDEN_WRITES[op._schema.name]
    return (names.index("running_mean"), names.index("running_var")), -1 if flag is None else names.index(flag)


@functools.cache
def optional_dtype(op: OpOverload) -> int | None:
    """Return the position of an op's ``ScalarType?`` argument, or None if it has none."""
    kinds = [str(each.real_type) for each in op._schema.arguments]
    return kinds.index("Optional[ScalarType]") if "Optional[ScalarType]" in kinds else None


@functools.cache
def overload_with_dtype(op: OpOverload) -> OpOverload | None:
    """Return the overload with the same arguments and a final ``ScalarType dtype``, or None."""
    names = [argument.name for argument in op._schema.arguments]
    for overload in op.overloadpacket.overloads():
        candidate: OpOverload = getattr(op.overloadpacket, overload)
        arguments = candidate._schema.arguments
        if (
            [argument.name for argument in arguments] == [*names, "dtype"]
            and str(arguments[-1].real_type) == "ScalarType"
            and not candidate._schema.is_mutable
        ):
            return candidate
    return None


def flatten_arguments(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return all arguments of a call in the order of the op's schema, with defaults filled in."""
    others = op._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(each.name, each.default_value) for each in others)]


def unflatten_arguments(op: OpOverload, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the keyword-only arguments of a call, given all in the order of the op's schema."""
    pairs = list(zip(op._schema.arguments, values, strict=True))
    positional = [value for argument, value in pairs if not argument.kwarg_only]
    return positional, {argument.name: value for argument, value in pairs if argument.kwarg_only}


def table_problems(table: object) -> list[str]:
    """Return a sentence for each problem of a policy table; none if it can be installed."""
    if not isinstance(table, Mapping):
        return [f"must map op names to CastPolicy, got {type(table).__name__}"]
    problems = (entry_problem(name, policy) for name, policy in table.items())
    return [problem for problem in problems if problem is not None]


def entry_problem(name: object, policy: object) -> str | None:
    """Return why an op cannot have a policy, or None. An op that torch lacks can have any."""
    if not isinstance(name, str) or not is_op_name(name):
        return f"{name!r} is not an op name as the dispatcher has it, such as 'aten::mm' or 'aten::norm.Scalar'"
    if name.endswith(".default"):
        return f"{name!r} must be written {name.removesuffix('.default')!r}: the dispatcher has no overload 'default'"
    if not isinstance(policy, CastPolicy):
        return f"the policy of {name!r} must be a CastPolicy, got {policy!r}"
    op = find_op(name)
    problem = None if op is None else policy_problem(op, policy)
    return None if problem is None else f"{name!r} {problem}"


@functools.cache
def policy_problem(op: OpOverload, policy: CastPolicy) -> str | None:
    """Return why an op cannot have a policy, as the end of a sentence that its name begins, or None."""
    if policy in (CastPolicy.BANNED, CastPolicy.PASSTHROUGH):
        return None
    arguments = op._schema.arguments
    if any(each.kwarg_only and is_written(each) for each in arguments):
        return "is an out= variant, whose inputs are never cast"
    if policy is not CastPolicy.MATCH and op._schema.is_mutable:
        if policy in (CastPolicy.FP32_SET_OPT_DTYPE, CastPolicy.FP32_APPEND_DTYPE):
            return f"writes to a tensor, whose dtype its result has: {policy.name} cannot change that"
        if all(is_written(each) for each in arguments if "Tensor" in str(each.real_type)):
            return "has no tensors but those that it writes, which are never cast"
    if torch.Tag.inplace_view in op.tags:
        return "gives a tensor another's memory or shape, which are not those of a cast"
    if policy is CastPolicy.FP32_SET_OPT_DTYPE and optional_dtype(op) is None:
        return f"has no optional dtype argument, which {policy.name} sets"
    if policy is CastPolicy.FP32_APPEND_DTYPE and overload_with_dtype(op) is None:
        return f"has no overload with the same arguments and a dtype, which {policy.name} calls"
    return None


def is_written(argument: Any) -> bool:
    """Return whether an op writes an argument, as far as its schema declares that."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


@functools.cache
def written_arguments(op: OpOverload) -> frozenset[int]:
    """Return the positions of the arguments that an op writes, as far as its schema declares that."""
    return frozenset(at for at, each in enumerate(op._schema.arguments) if is_written(each))


def is_op_name(name: str) -> bool:
    """Return whether a text is the name of an op, with its namespace, or of an overload."""
    namespace, _, rest = name.partition("::")
    base, dot, overload = rest.partition(".")
    return namespace.isidentifier() and base.isidentifier() and (overload.isidentifier() or not dot)
