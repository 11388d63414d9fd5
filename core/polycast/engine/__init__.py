"""What runs at the dispatcher's Autocast keys: choose an engine, put a backend's kernels in place, take them away."""

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch

from .. import env, state
from ..backend import Backend
from ..errors import BackendNotFoundError
from ..policy import CastPolicy
from ..registry import registry
from .kernels import Kernels, autocast_key
from .reference import ReferenceEngine
from .registered import Registration, policies_for, refuse_conflict, registrations


class Engine(state.StateMachine, Protocol):
    """What runs regions and kernels."""

    name: str

    def kernels(self, backend: Backend, policies: Mapping[str, CastPolicy], /) -> Kernels:
        """Put a backend's kernels in place, for the ops that `policies` names."""


class _Unchosen:
    """Stands where the engine's state machine will, until the first region makes a choice necessary."""

    def enter(self, owner: object, settings: state.Settings) -> bool:
        return choose().enter(owner, settings)

    def leave(self, owner: object) -> bool | None:
        return choose().leave(owner)

    def last(self) -> None:
        return None

    def open_regions(self, device_type: str) -> int:
        return 0

    def innermost(self, device_type: str) -> None:
        return None

    def nesting(self, device_type: str) -> int:
        return 0

    def dtype(self, device_type: str) -> torch.dtype:
        return torch.get_autocast_dtype(device_type)

    def clear_own_casts(self) -> None:
        pass


_reference = ReferenceEngine()
_engine: Engine | None = None
installed: dict[str, Kernels] = {}
"""By device type, the kernels that are in place."""
settled: set[str] = set()
"""The device types whose kernels are in place and await no more ops: their regions need not look."""
_lock = threading.RLock()

state.use(_Unchosen())


def choose() -> Engine:
    """Return the engine, choosing it if none is: as POLYCAST_ENGINE says, and the native one where it can be had.

    Raises:
        ValueError: POLYCAST_ENGINE has a value that is not legal.
        RuntimeError: POLYCAST_ENGINE is ``native``, and that engine cannot be built.
    """
    global _engine
    with _lock:
        if _engine is None:
            _engine = _choose(env.engine())
            state.use(_engine)
        return _engine


def forget_choice() -> None:
    """Have the next region choose anew; no region may be open."""
    global _engine
    uninstall()
    with _lock:
        _engine = None
        state.use(_Unchosen())


def _choose(wanted: str) -> Engine:
    if wanted == "reference":
        return _reference
    from . import build  # what it imports takes a while, and is needed here only

    try:
        return build.load()
    except build.BuildError as error:
        if wanted == "native":
            raise RuntimeError(f"POLYCAST_ENGINE=native, but the native engine cannot be built: {error}") from error
        warnings.warn(
            f"polycast runs on its reference engine, which is slower: the native engine cannot be built: {error} "
            "Set POLYCAST_ENGINE=reference to be content with it.",
            stacklevel=2,
        )
        return _reference


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

    The next region for the device puts them back. Where torch's own regions run on them, in other threads, that is the
    caller's to know: torch's dispatcher lets no kernel be taken away from under a call.

    Args:
        device_type: the device; None for all.

    Raises:
        ValueError, RuntimeError: `device_type` is not a device string that torch knows.
        RuntimeError: a thread is in a region of polycast's for the device; nothing changes.
    """
    names = None if device_type is None else [registry.parse_device_type(device_type)]
    _take_away(names, lambda: None)


def _take_away(device_types: Iterable[str] | None, change: Callable[[], object]) -> None:
    """Take the kernels of devices (None: of all) away, if they are in no region, and make a change before they return.

    A region is entered before it asks for its kernels: it is counted here, or finds its kernels gone and waits for us.
    """
    with _lock:
        names = list(installed) if device_types is None else [name for name in device_types if name in installed]
        taken = {name: installed.pop(name) for name in names}
        settled.difference_update(names)
        for name in names:
            count = state.machine.open_regions(name)
            if count:
                installed.update(taken)
                raise RuntimeError(
                    f"polycast's kernels for {name!r} are in use: {count} region{'s are' * (count > 1) or ' is'} open, "
                    "counting all threads. Leave them first."
                )
        try:
            change()
        except BaseException:
            installed.update(taken)
            raise
        for kernels in taken.values():
            kernels.remove()


def kernels_of(device_type: str, also: Iterable[str] = ()) -> Kernels:
    """Return a device's kernels, putting in place what is not there yet: those of its table and of the ops `also`."""
    while True:
        kernels = installed.get(device_type)
        if kernels is None:
            backend = registry.find(device_type)  # not with the lock held: a plugin may be imported, and do anything
            with _lock:
                if device_type not in installed and registry.find(device_type) is backend:
                    installed[device_type] = choose().kernels(
                        backend, {**backend.policies, **policies_for(device_type)}
                    )
        else:
            for name in also:
                if name not in kernels.ops:
                    kernels.add(name, None)
            if device_type not in settled:
                kernels.look_again()
                with _lock:
                    if not kernels.awaited and installed.get(device_type) is kernels:
                        settled.add(device_type)
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
        _take_away(changed, lambda: registrations.remove(old))
        for device_type in changed:
            kernels_of(device_type)


def enter(owner: object, settings: state.Settings) -> bool:
    """Enter a region on this thread, with its kernels in place; the answer is that of the state machine."""
    recorded = state.machine.enter(owner, settings)
    if settings.device_type not in settled or settings.overlay is not None:
        put_in_place(owner, settings)
    return recorded


def put_in_place(owner: object, settings: state.Settings) -> None:
    """Put in place what a region that `owner` has just entered needs; where that fails, the region is left."""
    try:
        if settings.enabled or settings.overlay:
            kernels_of(settings.device_type, settings.overlay or ())
    except BackendNotFoundError:
        if not settings.exact:  # a snapshot's may be of a region of torch's, for what no backend serves
            state.machine.leave(owner)
            raise
    except BaseException:
        state.machine.leave(owner)
        raise


def torch_ops(device_type: str) -> frozenset[str]:
    """Return the ops that the running torch itself treats at a device's Autocast key, by their dispatcher names."""
    key = autocast_key(device_type)
    kernels = installed.get(device_type)
    return frozenset(
        name
        for name in torch._C._dispatch_get_all_op_names()
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        and not (kernels is not None and name in kernels.added)
    )


registry.take_away = _take_away
