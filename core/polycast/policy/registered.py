"""Policies registered for single ops, which take precedence over the backends' tables."""

from collections.abc import Iterable
from dataclasses import dataclass

from .cast_policy import CastPolicy


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
