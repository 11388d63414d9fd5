"""`CastPolicy`, tables of them by op, and those registered for single ops, which take precedence over tables."""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


class CastPolicy(enum.Enum):
    """The treatment of an op's eligible inputs. The first five are those of torch's ATen/autocast_mode.h.

    An input is eligible if it is a floating-point tensor on the region's device and not float64.
    """

    LOWER_PRECISION_FP = "lower_precision_fp"
    """Cast every eligible input to the region's fast dtype."""
    FP32 = "fp32"
    """Cast every eligible input to float32."""
    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    """Cast nothing. If the first input is eligible, set an optional ``dtype`` that the caller omitted to float32."""
    FP32_APPEND_DTYPE = "fp32_append_dtype"
    """Cast nothing. If the first input is eligible, call the overload that takes a ``dtype``, with float32."""
    PROMOTE = "promote"
    """Cast the eligible inputs to float32 if their dtypes differ."""
    MATCH = "match"
    """If torch would refuse the inputs' dtypes, cast them to the dtype of the input that the op writes to or, if it
    writes to none, to float32. Cast nothing if one is not eligible. The ops that the op calls are autocast."""
    BANNED = "banned"
    """Raise RuntimeError, because the op is not safe in reduced precision."""
    PASSTHROUGH = "passthrough"
    """Run the op on its inputs without casting them."""


def policy_table(ops: Mapping[CastPolicy, Iterable[str]]) -> Mapping[str, CastPolicy]:
    """Turn lists of ops, one for each policy, into the table that a backend supplies.

    Args:
        ops: for each policy, the dispatcher names of its ops, such as ``"aten::mm"`` or ``"aten::norm.Scalar"``.

    Returns:
        A read-only mapping from op name to policy.

    Raises:
        ValueError: an op is named twice.
        TypeError: a list of names is a str.

    Example:
        >>> import polycast
        >>> dict(polycast.plugin.policy_table({polycast.CastPolicy.FP32: ["aten::exp", "aten::log"]}))
        {'aten::exp': <CastPolicy.FP32: 'fp32'>, 'aten::log': <CastPolicy.FP32: 'fp32'>}
    """
    table: dict[str, CastPolicy] = {}
    for policy, names in ops.items():
        if isinstance(names, str):
            raise TypeError(f"names of ops must be in a list or a tuple, got {names!r}: write ({names!r},)")
        for name in names:
            if name in table:
                raise ValueError(
                    f"{name!r} is named twice, as {table[name].name} and as {policy.name}: an op has one policy. "
                    "Remove one of the two."
                )
            table[name] = policy
    return MappingProxyType(table)


@dataclass(frozen=True, eq=False)
class Registration:
    """A policy for some ops, by dispatcher name, on one device or on all (None)."""

    ops: tuple[str, ...]
    policy: CastPolicy
    device_type: str | None


registrations: list[Registration] = []
"""The active registrations, oldest first."""


def policies_for(device_type: str, among: Iterable[Registration] = registrations) -> dict[str, CastPolicy]:
    """Return the registered policies of a device; those for this device only override those for all devices."""
    return {
        name: registration.policy
        for scope in (None, device_type)
        for registration in among
        if registration.device_type == scope
        for name in registration.ops
    }


def refuse_conflict(new: Registration) -> None:
    """Raise ValueError if an op has another policy already in the same scope, a device or all devices."""
    for old in registrations:
        both = [name for name in new.ops if name in old.ops]
        if both and old.device_type == new.device_type and old.policy is not new.policy:
            scope = "all devices" if new.device_type is None else repr(new.device_type)
            raise ValueError(
                f"{both[0]!r} is registered as {old.policy.name} for {scope}, and cannot be {new.policy.name} there "
                "too. Call remove() on what polycast.register_op() returned for it first."
            )
