"""The ops of the running torch: finding one by its name, and what its schema lets a policy do."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..torch_internals.names import OpOverload, OpOverloadPacket, find_schema_or_throw


def find_op(name: str) -> OpOverload | None:
    """Return the overload that a dispatcher name such as ``"aten::norm.Scalar"`` means, or None if torch lacks it."""
    qualified, _, overload = name.partition(".")
    namespace, _, base = qualified.partition("::")
    try:
        find_schema_or_throw(qualified, overload)
    except RuntimeError:
        return None
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    return found


def find_overloads(qualified: str) -> list[str]:
    """Return the overloads of an op such as ``"aten::norm"``, by their names in the dispatcher.

    Not those for dimensions with names, which call the others; torch has them up to 2.12.
    """
    namespace, _, base = qualified.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), base, None)
    if not isinstance(packet, OpOverloadPacket):
        return []  # a namespace has attributes that are no ops
    names: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    qualified_names = (qualified if name == "default" else f"{qualified}.{name}" for name in names)
    return [name for name in qualified_names if (op := find_op(name)) is not None and not names_dimensions(op)]


@functools.cache
def names_dimensions(op: OpOverload) -> bool:
    """Say whether an overload is for named tensors, whose dimensions it takes by name; a schema has texts for these."""
    return any(argument.name == "dim" and "str" in str(argument.real_type) for argument in op._schema.arguments)


@functools.cache
def optional_dtype(op: OpOverload) -> int | None:
    """Return the position of an op's ``ScalarType?`` argument, or None if it has none."""
    for position, argument in enumerate(op._schema.arguments):
        if str(argument.real_type) == "Optional[ScalarType]":
            return position
    return None


@functools.cache
def overload_with_dtype(op: OpOverload) -> OpOverload | None:
    """Return the overload with the same arguments and a ``ScalarType dtype`` more at the end, or None."""
    names = [argument.name for argument in op._schema.arguments]
    packet = op.overloadpacket
    for overload in packet.overloads():
        candidate: OpOverload = getattr(packet, overload)
        arguments = candidate._schema.arguments
        if (
            [argument.name for argument in arguments] == [*names, "dtype"]
            and str(arguments[-1].real_type) == "ScalarType"
            and not candidate._schema.is_mutable
        ):
            return candidate
    return None


def in_order(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return all that an op takes in the order of its schema, with the defaults of what a call leaves out."""
    others = op._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(each.name, each.default_value) for each in others)]


def by_schema(op: OpOverload, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the same as a call has them: those by position, and those that it takes by name only."""
    pairs = list(zip(op._schema.arguments, values, strict=True))
    positional = [value for argument, value in pairs if not argument.kwarg_only]
    return positional, {argument.name: value for argument, value in pairs if argument.kwarg_only}
