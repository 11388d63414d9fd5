"""`CastPolicy`, and the policies registered for single ops, which take precedence over tables."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class CastPolicy(enum.Enum):
    """The treatment of an op's eligible inputs. The first five are those of torch's ATen/autocast_mode.h.

    An input is eligible if it is a floating-point tensor on the region's device and not float64. A tensor that an op
    writes to is never cast.
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
    LOWER_FIRST = "lower_first"
    """Cast the first argument that has an eligible input, such as that of a norm, to the region's fast dtype, and leave
    the others, such as its weights, as they are. Of a list, all items are cast."""
    MATCH = "match"
    """If torch would refuse the inputs' dtypes, cast them to the dtype of the input that the op writes to or, if it
    writes to none, to float32. Cast nothing if one is not eligible. The ops that the op calls are autocast."""
    BANNED = "banned"
    """Raise RuntimeError, because the op is not safe in reduced precision."""
    PASSTHROUGH = "passthrough"
    """Run the op on its inputs without casting them."""


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
