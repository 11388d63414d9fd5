"""The kernels that are installed at the dispatcher's Autocast keys, and all else that regions change in torch."""

from collections.abc import Callable, Iterable

from ..common import generation
from ..common.atfork import fork_safe_lock
from ..errors import BackendNotFoundError, warn_user
from ..policy.cast_policy import CastPolicy, policies_for, registrations
from ..registry.backend import Backend
from ..registry.registry import registry
from ..torch_internals import changes
from ..torch_internals.dispatcher import all_op_names, has_kernel, has_kernel_for_dispatch_key
from ..torch_internals.patcher import undo_all
from . import state
from .casts.cast_cache import caches_alive, process_cache
from .choice import choose_engine, chosen, reference_note, reset_engine
from .kernels import Kernels, autocast_key, installed
from .override import Override
from .state import Settings, ready, ready_with_cache

lock = fork_safe_lock()
"""Held while kernels are installed and removed."""


def install(device_type: str) -> None:
    """Install polycast's kernels for a device, also where the device cannot be used now.

    The first region for a device does so by itself. Call it for code that enables autocast in other ways
    (torch.autocast, ``torch.set_autocast_enabled``), and for fake tensors of an absent device. It changes the kernels
    of the whole process; :func:`uninstall` restores torch's own.

    Args:
        device_type: a device string that torch knows, such as ``"cuda"``.

    Raises:
        ValueError, RuntimeError: as :func:`polycast.plugin.get_backend`.

    Example:
        >>> import polycast
        >>> polycast.install("cpu")
        >>> polycast.uninstall("cpu")
    """
    kernels_of(registry.find(device_type).device_type)


def uninstall(device_type: str | None = None) -> None:
    """Remove polycast's kernels, so that torch runs its own.

    Without a device, undo everything else that regions have changed in torch, such as in its compiler and checkpoints.
    This does not end a :class:`patch_torch` or an :func:`observe`, nor remove rules for modules.

    The next region for the device installs them again. The hooks that detect unversioned writes stay while a
    :class:`WeightCache` is alive. Do not call it while other threads run torch's own regions on the kernels: torch's
    dispatcher does not wait for calls of a kernel that is removed.

    Args:
        device_type: the device; None for all.

    Raises:
        ValueError, RuntimeError: `device_type` is not a device string that torch knows.
        RuntimeError: a thread is in a region of polycast's for the device, or this thread runs one of its kernels,
            which has called Python; nothing changes.
    """
    if device_type is None:
        run_uninstalled(None, _undo_changes)
    else:
        run_uninstalled([registry.parse_device_type(device_type)], lambda: None)
    with lock:
        engine = chosen()
        if engine is not None and not installed and not caches_alive:
            engine.unwatch_writes()


def _undo_changes() -> None:
    process_cache.existing = None
    undo_all()


def forget_choice() -> None:
    """Uninstall all kernels, and let the next region choose an engine; no region may be open.

    For tests: a program keeps its engine.
    """
    uninstall()
    engine = chosen()
    if engine is not None:
        engine.unwatch_writes()
    reset_engine()


def run_uninstalled(device_types: Iterable[str] | None, change: Callable[[], object]) -> None:
    """Make a change while the kernels of devices (None: of all) are uninstalled.

    A thread enters a region before it asks for kernels. So its region is counted here, or it waits for the lock.

    Raises:
        RuntimeError: a region for one of the devices is open, or this thread runs a kernel; nothing changes.
    """
    with lock:
        names = list(installed) if device_types is None else [name for name in device_types if name in installed]
        removed = {name: installed.pop(name) for name in names}
        ready.difference_update(names, removed.values())
        try:
            for name in names:
                _refuse_if_in_use(name)
            change()
        except BaseException:
            installed.update(removed)
            raise
        finally:
            generation.advance()  # an interrupt may come after the change
        for kernels in removed.values():
            kernels.remove()


def _refuse_if_in_use(device_type: str) -> None:
    if state.machine.runs_kernel(device_type):
        raise RuntimeError(
            f"polycast's kernels for {device_type!r} are in use: this thread runs one, which has called Python. "
            "Wait until the op returns."
        )
    count = state.machine.open_regions(device_type)
    if count:
        raise RuntimeError(
            f"polycast's kernels for {device_type!r} are in use: {count} region{'s are' * (count > 1) or ' is'} open, "
            "counting all threads. Leave them first."
        )


def install_for(settings: Settings) -> None:
    """Install what a region needs: kernels, and, for an override or a cache, the changes to torch's own code."""
    kernels, override = None, settings.override
    try:
        if settings.enabled or override is not None:
            kernels = kernels_of(settings.device_type, () if override is None else override.added)
    except BackendNotFoundError:
        if not settings.absolute:  # a snapshot may have a region of torch's, for a device without a backend
            raise
    if not settings.has_more_than_torch:
        return
    support_overrides(settings.device_type, override)
    # Otherwise each entry has to look at the compiler's stance.
    if kernels is not None and changes.overrides_are_guarded():
        if override is None:
            ready_with_cache[settings.device_type] = kernels
        else:
            override.ready_key = kernels


def support_overrides(device_type: str, override: Override | None) -> None:
    """Make the changes to torch that regions with an override or a cache take."""
    from .snapshot import guard_on

    guard_on(device_type)
    recipe = None if override is None else override.recipe
    for feature in (*changes.FOR_OVERRIDES, *(() if recipe is None else recipe.features)):
        feature.make()


def watch_writes() -> None:
    """Watch for writes to weights that do not increment the version, also before the first region."""
    engine = choose_engine()
    with lock:
        engine.watch_writes()


def kernels_of(device_type: str, also: Iterable[str] = ()) -> Kernels:
    """Return a device's kernels; install those of its table, and of the ops `also`, that are not installed yet."""
    while True:
        kernels = installed.get(device_type)
        if kernels is None:
            # Without the lock: a plugin may be imported, which can run anything, and an engine compiled.
            backend, engine = registry.find(device_type), choose_engine()
            if note := reference_note():
                warn_user(f"Regions run{note}. Set POLYCAST_ENGINE=reference to silence this warning.")
            added = {op: each.policy for op, each in registry.added_policies(backend).items()}
            if registrations or added:
                changes.CACHE_KEYS.make()
            with lock:
                is_unchanged = registry.loaded(device_type) is backend and chosen() is engine
                if device_type not in installed and is_unchanged:
                    engine.watch_writes()
                    policies = {**_matched(backend), **added, **backend.policies, **policies_for(device_type)}
                    installed[device_type] = engine.kernels(backend, policies)
                    registry.used.add(device_type)
        else:
            for name in also:
                if name not in kernels.ops:
                    kernels.add(name, None)
            if device_type not in ready:
                kernels.add_pending()
                with lock:
                    if not kernels.pending and installed.get(device_type) is kernels:
                        ready.update((device_type, kernels))
            return kernels


def _matched(backend: Backend) -> dict[str, CastPolicy]:
    """Return the matched ops of a backend. Its table leaves those of torch's kernels out on purpose."""
    key = autocast_key(backend.device_type)
    ours = (name for name in backend.matched_ops if not (has_kernel(name) and has_kernel_for_dispatch_key(name, key)))
    return dict.fromkeys(ours, CastPolicy.MATCH)


def torch_ops(device_type: str) -> frozenset[str]:
    """Return the ops that torch itself has a kernel for at a device's Autocast key, by their dispatcher names."""
    key = autocast_key(device_type)
    kernels = installed.get(device_type)
    return frozenset(
        name
        for name in all_op_names()
        if has_kernel_for_dispatch_key(name, key) and not (kernels is not None and name in kernels.added)
    )
