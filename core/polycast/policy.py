"""Cast policies: what autocast does with the inputs of an op, and the tables that say so for each op."""

import enum
import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch


class CastPolicy(enum.Enum):
    """What happens to the eligible inputs of an op; the first five mean what torch's ATen/autocast_mode.h says.

    An input is eligible when it is a floating-point tensor on the region's device and not float64.
    """

    LOWER_PRECISION_FP = "lower_precision_fp"
    """Cast every eligible input to the region's fast dtype."""
    FP32 = "fp32"
    """Cast every eligible input to float32."""
    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    """Cast nothing; if the first input is eligible, give float32 to an optional ``dtype`` that the caller left out."""
    FP32_APPEND_DTYPE = "fp32_append_dtype"
    """Cast nothing; call the overload that takes a ``dtype``, with float32 if the first input is eligible."""
    PROMOTE = "promote"
    """Cast the eligible inputs to float32 if their dtypes differ; inputs of one dtype stay as they are."""
    BANNED = "banned"
    """Raise RuntimeError: the op is not safe in reduced precision."""
    PASSTHROUGH = "passthrough"
    """Run the op on its inputs as they are."""


def policy_table(ops: Mapping[CastPolicy, Iterable[str]]) -> Mapping[str, CastPolicy]:
    """Turn lists of ops, one for each policy, into the table that a backend supplies.

    Args:
        ops: for each policy the names of its ops as the dispatcher has them, such as ``"aten::mm"`` or
            ``"aten::norm.Scalar"``.

    Returns:
        A read-only mapping from op name to policy.

    Raises:
        ValueError: an op is named twice.

    Example:
        >>> from polycast import CastPolicy, policy_table
        >>> dict(policy_table({CastPolicy.FP32: ["aten::exp", "aten::log"]}))
        {'aten::exp': <CastPolicy.FP32: 'fp32'>, 'aten::log': <CastPolicy.FP32: 'fp32'>}
    """
    table: dict[str, CastPolicy] = {}
    for policy, names in ops.items():
        for name in names:
            if name in table:
                raise ValueError(
                    f"{name!r} is named twice, as {table[name].name} and as {policy.name}: an op has one policy. "
                    "Remove one of the two."
                )
            table[name] = policy
    return MappingProxyType(table)


def find_op(name: str) -> torch._ops.OpOverload | None:
    """Return the overload that a dispatcher name such as ``"aten::norm.Scalar"`` means, or None if torch lacks it."""
    qualified, _, overload = name.partition(".")
    namespace, _, base = qualified.partition("::")
    try:
        torch._C._dispatch_find_schema_or_throw(qualified, overload)
    except RuntimeError:
        return None
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    return found


def table_problems(table: object) -> list[str]:
    """Say what is wrong with a policy table: a sentence for each problem, none for a table that can be installed."""
    if not isinstance(table, Mapping):
        return [f"must map op names to CastPolicy, got {type(table).__name__}"]
    problems: list[str] = []
    seen: set[str] = set()
    for name, policy in table.items():
        problem = entry_problem(name, policy)
        if problem is None and name in seen:
            problem = f"{name!r} is named twice"
        if problem is None:
            seen.add(name)
        else:
            problems.append(problem)
    return problems


def entry_problem(name: object, policy: object) -> str | None:
    """Say why an op cannot have a policy, or nothing if it can; an op that torch lacks can have any."""
    if not isinstance(name, str) or not _is_op_name(name):
        return f"{name!r} is not an op name as the dispatcher has it, such as 'aten::mm' or 'aten::norm.Scalar'"
    if name.endswith(".default"):
        return f"{name!r} must be written {name.removesuffix('.default')!r}: the dispatcher has no overload 'default'"
    if not isinstance(policy, CastPolicy):
        return f"the policy of {name!r} must be a CastPolicy, got {policy!r}"
    op = find_op(name)
    if op is None or policy in (CastPolicy.BANNED, CastPolicy.PASSTHROUGH):
        return None
    if op._schema.is_mutable:
        return f"{name!r} writes to its inputs: in-place and out= variants are never cast, so {policy.name} cannot hold"
    if policy is CastPolicy.FP32_SET_OPT_DTYPE and optional_dtype(op) is None:
        return f"{name!r} has no optional dtype argument, which {policy.name} sets"
    if policy is CastPolicy.FP32_APPEND_DTYPE and overload_with_dtype(op) is None:
        return f"{name!r} has no overload with the same arguments and a dtype, which {policy.name} calls"
    return None


def _is_op_name(name: str) -> bool:
    namespace, separator, rest = name.partition("::")
    base, dot, overload = rest.partition(".")
    return (
        bool(separator)
        and namespace.isidentifier()
        and base.isidentifier()
        and (overload.isidentifier() if dot else True)
    )


@functools.cache
def optional_dtype(op: torch._ops.OpOverload) -> int | None:
    """Return the position of an op's ``ScalarType?`` argument, or None if it has none."""
    for position, argument in enumerate(op._schema.arguments):
        if str(argument.real_type) == "Optional[ScalarType]":
            return position
    return None


@functools.cache
def overload_with_dtype(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the overload with the same arguments and a ``ScalarType dtype`` more at the end, or None."""
    names = [argument.name for argument in op._schema.arguments]
    packet = op.overloadpacket
    for overload in packet.overloads():
        candidate: torch._ops.OpOverload = getattr(packet, overload)
        arguments = candidate._schema.arguments
        if (
            [argument.name for argument in arguments] == [*names, "dtype"]
            and str(arguments[-1].real_type) == "ScalarType"
            and not candidate._schema.is_mutable
        ):
            return candidate
    return None
