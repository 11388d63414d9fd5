"""The kernels that are in place at the dispatcher's Autocast keys: installing, uninstalling and changing them."""

import threading
from collections.abc import Callable, Iterable

from ..common.atfork import hold_during_fork
from ..plugins.registry import registry
from ..policy.registered import Registration, policies_for, refuse_conflict, registrations
from ..torch_internals import changes
from ..torch_internals.dispatcher import all_op_names, has_kernel_for_dispatch_key
from . import state
from .casts.weight_cache import caches_alive
from .choice import choose, chosen, forget
from .kernels import Kernels, autocast_key

installed: dict[str, Kernels] = {}
"""By device type, the kernels that are in place."""
fully_installed: set[object] = set()
"""The device types whose kernels are in place and await no more ops, and those kernels: their regions need not look."""
also_put_in_place: list[Callable[[], None]] = []
"""What puts something of other rooms into torch, where a region with policies or a cache has been entered."""
taken_back: list[Callable[[], None]] = []
"""Callbacks that :func:`uninstall` runs before it undoes the changes to torch."""
_lock = threading.RLock()
hold_during_fork(lambda: [_lock])


def forget_choice() -> None:
    """Uninstall all kernels and have the next region choose an engine anew; no region may be open."""
    uninstall()
    engine = chosen()
    if engine is not None:
        engine.unwatch_writes()
    forget()


def install(device_type: str) -> None:
    """Put polycast's kernels in place for a device, also where the device cannot be used now.

    The first region for a device does this by itself. By hand it is of use for what enables autocast otherwise
    (torch.autocast, ``torch.set_autocast_enabled``) and for fake tensors of a device that is absent. It changes the
    kernels of the whole process; :func:`uninstall` gives torch its own back.

    Args:
        device_type: a device string that torch knows, such as ``"cuda"``.

    Raises:
        ValueError, RuntimeError: as :func:`polycast.get_backend`.

    Example:
        >>> import polycast
        >>> polycast.install("cpu")
        >>> polycast.uninstall("cpu")
    """
    kernels_of(registry.find(device_type).device_type)


def uninstall(device_type: str | None = None) -> None:
    """Take polycast's kernels away: torch has its own again, as if polycast had never been used.

    Without a device, all that regions have changed in torch is undone too, in its compiler and its checkpoints. What
    you have begun yourself you end yourself: :class:`patch_torch`, :func:`observe`, rules for modules.

    The next region for the device puts them back. What sees writes that count no version stays in place while a
    :class:`WeightCache` is alive. Where torch's own regions run on the kernels, in other threads, that is the caller's
    to know: torch's dispatcher lets no kernel be taken away from under a call.

    Args:
        device_type: the device; None for all.

    Raises:
        ValueError, RuntimeError: `device_type` is not a device string that torch knows.
        RuntimeError: a thread is in a region of polycast's for the device; nothing changes.
    """
    if device_type is None:
        _run_uninstalled(None, _undo_changes)
    else:
        _run_uninstalled([registry.parse_device_type(device_type)], lambda: None)
    with _lock:
        engine = chosen()
        if engine is not None and not installed and not caches_alive:
            engine.unwatch_writes()


def _undo_changes() -> None:
    for take_back in taken_back:
        take_back()
    changes.undo_all()


def _run_uninstalled(device_types: Iterable[str] | None, change: Callable[[], object]) -> None:
    """Make a change while the kernels of devices (None: of all) are uninstalled, if no region for them is open.

    A region is entered before it asks for its kernels: it is counted here, or finds its kernels gone and waits for us.
    """
    with _lock:
        names = list(installed) if device_types is None else [name for name in device_types if name in installed]
        taken = {name: installed.pop(name) for name in names}
        fully_installed.difference_update(names, taken.values())
        try:
            for name in names:
                _refuse_if_in_use(name)
            change()
        except BaseException:
            installed.update(taken)
            raise
        for kernels in taken.values():
            kernels.remove()


def _refuse_if_in_use(device_type: str) -> None:
    count = state.machine.open_regions(device_type)
    if count:
        raise RuntimeError(
            f"polycast's kernels for {device_type!r} are in use: {count} region{'s are' * (count > 1) or ' is'} open, "
            "counting all threads. Leave them first."
        )


def kernels_of(device_type: str, also: Iterable[str] = ()) -> Kernels:
    """Return a device's kernels, putting in place what is not there yet: those of its table and of the ops `also`."""
    while True:
        kernels = installed.get(device_type)
        if kernels is None:
            # Not with the lock held: a plugin may be imported, and do anything; and an engine may be compiled.
            backend, engine = registry.find(device_type), choose()
            with _lock:
                is_as_found = registry.find(device_type) is backend and chosen() is engine
                if device_type not in installed and is_as_found:
                    engine.watch_writes()
                    policies = {**backend.policies, **policies_for(device_type)}
                    installed[device_type] = engine.kernels(backend, policies)
        else:
            for name in also:
                if name not in kernels.ops:
                    kernels.add(name, None)
            if device_type not in fully_installed:
                kernels.look_again()
                with _lock:
                    if not kernels.awaited and installed.get(device_type) is kernels:
                        fully_installed.update((device_type, kernels))
            return kernels


def register(new: Registration) -> None:
    """Have a registered policy in force, also in the regions that are open.

    Raises:
        ValueError: an op has another policy registered.
    """
    with _lock:
        refuse_conflict(new)
        registrations.append(new)
        try:
            for device_type, kernels in installed.items():
                for name, policy in policies_for(device_type).items():
                    kernels.add(name, policy, over=True)
        except BaseException:
            registrations.remove(new)
            raise


def unregister(old: Registration) -> None:
    """Take a registered policy back, if it is in force: what was there before it is there again.

    Raises:
        RuntimeError: a thread is in a region of a device whose kernels have to change; nothing changes.
    """
    with _lock:
        if old not in registrations:
            return
        others = [registration for registration in registrations if registration is not old]
        changed = [name for name in installed if policies_for(name) != policies_for(name, others)]
        _run_uninstalled(changed, lambda: registrations.remove(old))
        for device_type in changed:
            kernels_of(device_type)


def torch_ops(device_type: str) -> frozenset[str]:
    """Return the ops that the running torch itself treats at a device's Autocast key, by their dispatcher names."""
    key = autocast_key(device_type)
    kernels = installed.get(device_type)
    return frozenset(
        name
        for name in all_op_names()
        if has_kernel_for_dispatch_key(name, key) and not (kernels is not None and name in kernels.added)
    )


registry.run_uninstalled = _run_uninstalled
