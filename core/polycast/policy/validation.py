"""Validate policy tables against the ops of the running torch."""

from collections.abc import Mapping

from .cast_policy import CastPolicy
from .schemas import find_op, optional_dtype, overload_with_dtype


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
    if op is None or policy in (CastPolicy.BANNED, CastPolicy.PASSTHROUGH):
        return None
    if op._schema.is_mutable:
        return f"{name!r} writes to its inputs: in-place and out= variants are never cast, so {policy.name} cannot hold"
    if policy is CastPolicy.FP32_SET_OPT_DTYPE and optional_dtype(op) is None:
        return f"{name!r} has no optional dtype argument, which {policy.name} sets"
    if policy is CastPolicy.FP32_APPEND_DTYPE and overload_with_dtype(op) is None:
        return f"{name!r} has no overload with the same arguments and a dtype, which {policy.name} calls"
    return None


def is_op_name(name: str) -> bool:
    """Return whether a text is the name of an op, with its namespace, or of an overload."""
    namespace, _, rest = name.partition("::")
    base, dot, overload = rest.partition(".")
    return namespace.isidentifier() and base.isidentifier() and (overload.isidentifier() or not dot)
