"""Policies for ops of other libraries than torch: custom ops of torch.library and of C++ extensions."""

from typing_extensions import Self

from ..policy.cast_policy import CastPolicy
from ..policy.names import ops_with, read_op, read_policy
from ..policy.registered import Registration
from ..registry.registry import registry
from ..torch_internals.dispatcher import CustomOpDef, OpOverload, OpOverloadPacket, has_autocast_key
from . import installation


class OpRegistration(Registration):
    """A registration by :func:`register_op`; a context manager that removes it on exit.

    Attributes:
        ops: the ops, by their names in the dispatcher.
        policy: their policy.
        device_type: the device it is for; None for all.
    """

    def remove(self) -> None:
        """Remove the registration, and restore the policy before it. Removing it again has no effect.

        Raises:
            RuntimeError: a thread is in a region for a device of the registration; nothing changes.
        """
        installation.unregister(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def register_op(
    op: OpOverload | OpOverloadPacket | CustomOpDef | str,
    policy: CastPolicy | str,
    *,
    device_type: str | None = None,
) -> OpRegistration:
    """Give an op a policy in regions, on one device or on all that have a backend, now or later.

    It takes precedence over the backend's table and over earlier calls of ``torch.library.register_autocast`` for the
    op. A registration for one device takes precedence over one for all, and the ``policy=`` of a region over both.
    Compiled functions keep the casts that they were compiled with.

    Args:
        op: an overload (``torch.ops.acme.scale.default``), what ``torch.library.custom_op`` returned, a packet
            (``torch.ops.acme.scale``), or a name, as in a :class:`Policy`: ``"acme::scale"`` and the packet mean all
            overloads that can have the policy (those that write to their inputs can only be banned);
            ``"acme::scale.default"`` means one.
        policy: the policy, or its name (``"fp32"``).
        device_type: a device string that torch knows, such as ``"cuda"``; None for all devices.

    Returns:
        The registration; remove it with ``remove()``, or use it as a context manager.

    Raises:
        TypeError: `op` is not an op.
        ValueError: torch has no op of that name, or there is no such policy, with the nearest names; the op cannot have
            the policy; or another policy is registered for it.
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
    if device is not None and not has_autocast_key(device):
        raise RuntimeError(f"torch has no Autocast dispatch key for {device!r}: no policy can be registered for it")
    name = read_op(op)
    policy = read_policy(policy, f"the policy of {name.short!r}")
    registration = OpRegistration(tuple(ops_with(name, policy)), policy, device)
    installation.register(registration)
    return registration
