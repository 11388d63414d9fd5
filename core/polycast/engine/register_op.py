"""Policies for ops of other libraries than torch: custom ops of torch.library and of C++ extensions."""

from collections.abc import Sequence

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from typing_extensions import Self

from ..plugins.registry import registry
from ..policy.cast_policy import CastPolicy
from ..policy.registered import Registration
from ..policy.schemas import find_op
from ..policy.validation import entry_problem
from . import installation


class OpRegistration(Registration):
    """What :func:`register_op` did; a context manager that takes it back at its end.

    Attributes:
        ops: the ops, by their names in the dispatcher.
        policy: their policy.
        device_type: the device that they have it on; None for all.
    """

    def remove(self) -> None:
        """Take the registration back: what was there before is in force again. To do so twice is no error.

        Raises:
            RuntimeError: a thread is in a region of a device that this concerns; nothing changes.
        """
        installation.unregister(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def register_op(
    op: OpOverload | OpOverloadPacket | CustomOpDef | str, policy: CastPolicy, *, device_type: str | None = None
) -> OpRegistration:
    """Give an op a policy in regions, on one device or on all that have a backend, now or later.

    It goes before the policy in a backend's table, and before what ``torch.library.register_autocast`` was told of the
    op until then; what is registered for one device goes before what is for all, and the ``policy=`` of a region before
    everything. Compiled functions keep the casts that they were compiled with.

    Args:
        op: an overload (``torch.ops.acme.scale.default``), a packet (``torch.ops.acme.scale``: all its overloads; where
            `policy` casts, those that write to their inputs are left alone), what ``torch.library.custom_op`` returned,
            or the name of an overload in the dispatcher (``"acme::scale"``).
        policy: what is to happen to the inputs of the op.
        device_type: a device string that torch knows, such as ``"cuda"``; None for all devices.

    Returns:
        The registration, to take it back with ``remove()`` or by leaving it as a context manager.

    Raises:
        TypeError: `op` is not an op.
        ValueError: torch has no op of that name; the op cannot have the policy; or another policy is registered for it.
        ValueError, RuntimeError: `device_type` is not a device string that torch knows, or not of a device with an
            Autocast dispatch key.

    Example:
        >>> import torch, polycast
        >>> @torch.library.custom_op("acme::scale", mutates_args=())
        ... def scale(x: torch.Tensor, by: float) -> torch.Tensor:
        ...     return x * by
        >>> with polycast.register_op(scale, polycast.CastPolicy.LOWER_PRECISION_FP), polycast.autocast("cpu"):
        ...     print(scale(torch.ones(2), 3.0).dtype)
        torch.bfloat16
    """
    device = None if device_type is None else registry.parse_device_type(device_type)
    if device is not None and not torch._C._is_autocast_available(device):
        raise RuntimeError(f"torch has no Autocast dispatch key for {device!r}: no policy can be registered for it")
    names = _names(op, policy)
    problems = [problem for name in names if (problem := entry_problem(name, policy)) is not None]
    if problems:
        raise ValueError("; ".join(problems))
    registration = OpRegistration(tuple(names), policy, device)
    installation.register(registration)
    return registration


def _names(op: object, policy: object) -> Sequence[str]:
    """Return the names in the dispatcher of the overloads that an op stands for."""
    if isinstance(op, CustomOpDef):
        op = op._opoverload
    if isinstance(op, OpOverload):
        return [_name(op)]
    if isinstance(op, OpOverloadPacket):
        overloads: list[OpOverload] = [getattr(op, name) for name in op.overloads()]  # type: ignore[no-untyped-call]
        casts = policy not in (CastPolicy.BANNED, CastPolicy.PASSTHROUGH)
        functional = [overload for overload in overloads if not overload._schema.is_mutable]
        return [_name(overload) for overload in (functional if casts and functional else overloads)]
    if not isinstance(op, str):
        raise TypeError(
            "op must be an OpOverload such as torch.ops.aten.mm.default, an OpOverloadPacket such as "
            "torch.ops.aten.mm, what torch.library.custom_op returned, or a name in the dispatcher such as 'aten::mm'; "
            f"got {op!r}"
        )
    if entry_problem(op, CastPolicy.PASSTHROUGH) is None and find_op(op) is None:
        raise ValueError(f"torch has no op {op!r} now: load the library that defines it first")
    return [op]


def _name(overload: OpOverload) -> str:
    return str(overload.name())  # type: ignore[no-untyped-call]
