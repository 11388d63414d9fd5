"""The ops of the running torch: finding one by its name, and what its schema lets a policy do."""

import functools

import torch


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
