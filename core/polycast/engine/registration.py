"""Backends and policies of ops that are registered by hand, and backends whose answers change."""

import importlib

from typing_extensions import Self

from ..common import generation
from ..common.announce import log
from ..policy import manifests
from ..policy.cast_policy import CastPolicy, Registration, policies_for, refuse_conflict, registrations
from ..policy.names import ops_with, read_op, read_policy
from ..registry.backend import Backend
from ..registry.rediscovery import changed_devices
from ..registry.registry import discover, registry
from ..registry.statuses import BackendStatuses, statuses
from ..registry.validation import validate
from ..torch_internals import changes
from ..torch_internals.dispatcher import CustomOpDef, OpOverload, OpOverloadPacket, has_autocast_key
from . import state
from .installation import kernels_of, lock, run_uninstalled
from .kernels import installed


def register_backend(backend: Backend) -> None:
    """Register a backend by hand; it takes precedence over those from entry points.

    Args:
        backend: an instance of a subclass of :class:`polycast.plugin.Backend`.

    Raises:
        InvalidBackendError: it violates the contract (a ValueError); nothing is registered.
        ValueError: a backend for its device type is already registered by hand.
        RuntimeError: a thread is in a region for the device; nothing is registered.
    """
    validate(backend)
    registry.loaders()  # not with the engine's lock held
    run_uninstalled([backend.device_type], lambda: registry.register(backend))
    log.info("%s: backend: %s.%s, by hand", backend.device_type, type(backend).__module__, type(backend).__name__)


def unregister_backend(device_type: str) -> None:
    """Undo ``register_backend``; the device type uses the backend from an entry point again, if there is one.

    Raises:
        BackendNotFoundError: no backend for `device_type` is registered by hand.
        RuntimeError: a thread is in a region for the device; nothing changes.
    """
    name = registry.parse_device_type(device_type)
    registry.loaders()
    run_uninstalled([name], lambda: registry.unregister(name))


def backends(*, refresh: bool = False) -> BackendStatuses:
    """Return the status of every device type that has a backend or a torch Autocast key, in a read-only mapping.

    A status is found when it is first read, which imports the plugin of that device only. ``print`` and notebooks show
    a table of all.

    Args:
        refresh: True to find packages that were installed or removed since the first look. A device in use that the
            same packages serve keeps its backend, and a region that was made before its dtype and recipe. An upgrade of
            an imported package needs a new process, and so do functions that are compiled for a device that other
            packages serve now. It reads the ``POLYCAST_`` variables again, except ``POLYCAST_ENGINE``.

    Raises:
        ValueError: a ``POLYCAST_`` variable has an invalid value.
        RuntimeError: with `refresh`, a thread is in a region for a device that other packages serve now; nothing
            changes.

    Example:
        >>> import polycast
        >>> polycast.backends()["cpu"].state
        'ready'
    """
    if refresh:
        importlib.invalidate_caches()
        registry.discovery()
        new = discover()  # not with the engine's lock held
        with lock:
            run_uninstalled(changed_devices(registry.discovery(), new), lambda: registry.adopt(new))
        manifests.forget()
        new.log()
    return statuses()


def refresh(device_type: str) -> None:
    """Ask the backend of a device again, for regions that are made later: others keep their dtype and recipe.

    That a device, a dtype or a recipe is available is asked once in a process, as torch asks once for a driver; a
    refusal is asked again each time. A backend calls this when such an answer, its `default_dtype`, or what its recipes
    are resolved to changes. Registering and unregistering a backend, and :func:`polycast.uninstall`, do the same.

    Args:
        device_type: a device string that torch knows, such as ``"cuda"``.

    Raises:
        ValueError, RuntimeError: `device_type` is not a device string that torch knows.
    """
    registry.parse_device_type(device_type)
    generation.advance()
    state.machine.forget_actions()


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
        with lock:
            if self not in registrations:
                return
            others = [each for each in registrations if each is not self]
            changed = [name for name in installed if policies_for(name) != policies_for(name, others)]
            run_uninstalled(changed, lambda: registrations.remove(self))
            state.machine.forget_actions()
            for device_type in changed:
                kernels_of(device_type)

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
            overloads that can have the policy (those that write to their inputs: MATCH and BANNED);
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
    changes.CACHE_KEYS.make()
    with lock:
        refuse_conflict(registration)
        registrations.append(registration)
        try:
            for each, kernels in installed.items():  # effective at once, also in open regions
                for registered, its_policy in policies_for(each).items():
                    kernels.add(registered, its_policy, replace=True)
        except BaseException:
            registrations.remove(registration)
            raise
        finally:
            state.machine.forget_actions()
    return registration
