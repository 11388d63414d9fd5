"""`profile` and `find`: the profile of a device, measured once for each machine."""

import logging
import os
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from polycast.errors import warn_user
from polycast.plugin import Backend, get_backend, hold_during_fork
from polycast.plugin import refresh as refresh_backend

from . import profile_file
from .device_profile import BUSY, DeviceProfile
from .profile_file import Conditions, announce


@dataclass(frozen=True)
class Lookup:
    """The profile of a device, and why the one on disk is not used, if there is one."""

    backend: Backend
    profile: DeviceProfile | None
    refusal: str | None = None

    @property
    def warning(self) -> str | None:
        """A sentence that says why the profile on disk is not used; None if it is, or there is none."""
        return None if self.refusal is None else f"the profile on disk is ignored: {self.refusal}"


_log = logging.getLogger("polycast.fastest")
_found: dict[tuple[str, int], Lookup] = {}
"""By device type and number of threads."""
_lock = threading.RLock()
_being_measured: set[str] = set()
"""The devices that the thread with `_lock` measures."""
_import_lock = threading.RLock()
hold_during_fork(lambda: [_import_lock])  # in a child that is forked during an import, the import would hang


def profile(device_type: str, *, refresh: bool = False) -> DeviceProfile:
    """Return what is fast on a device, measuring it if that has not been done on this machine.

    Ops are timed in float32, in each fast dtype and by each recipe, which takes at most 3 s on a CPU, unless calls of
    the smallest size take 50 ms or more. The result is kept on disk, in ``$XDG_CACHE_HOME/polycast``
    (``~/.cache/polycast``), for this device, number of threads, settings of torch that select kernels, and versions of
    torch, polycast and the backend. Call it while the machine is otherwise idle: a noisy result is kept, too,
    until you measure again. A message on stderr says that it measures, that the result is noisy, and why
    a profile on disk is not used.

    If ``POLYCAST_PROFILE`` is the path of a saved profile of this device type, that one is returned, whichever machine
    it is from. The variable is read once.

    Args:
        device_type: the device type, such as ``"cpu"``.
        refresh: measure again; the result replaces the profile, unless it is noisy and no better.

    Raises:
        ValueError: `device_type` is not a str, or ``POLYCAST_PROFILE`` is not the path of a profile.
        RuntimeError: torch does not know the device, or it is not available.
        BackendNotFoundError: no backend is installed for it.

    Warns:
        UserWarning: the profile cannot be kept on disk, so each process will measure.

    Example:
        >>> import polycast
        >>> polycast.profile("cpu").ratio("linear", 128, "bfloat16")  # doctest: +SKIP
        0.31
    """
    found, complaint = obtain(device_type, refresh)
    if complaint:
        announce(complaint)
    return found


def obtain(device_type: str, refresh: bool) -> tuple[DeviceProfile, str]:
    """Return a profile as :func:`profile` does, and a sentence if the device was measured, with noise; else ""."""
    found = None if refresh else find(device_type)
    if found is not None:
        return found, ""
    with _lock:
        found = None if refresh else find(device_type)  # another thread may have measured it
        return _measured(get_backend(device_type), refresh) if found is None else (found, "")


def find(device_type: str) -> DeviceProfile | None:
    """Return the profile of a device, or None if it has not been measured; measure nothing.

    The answer is kept in the process.
    """
    return look_up(device_type).profile


def find_profile(device_type: str) -> DeviceProfile | None:
    """Return what is fast on a device, if :func:`profile` has measured it; else, or if it cannot be read, None.

    Args:
        device_type: the device type, such as ``"cpu"``.
    """
    try:
        return find(device_type)
    except (RuntimeError, ValueError):
        return None


def look_up(device_type: str) -> Lookup:
    """Return the profile of a device, or why the one on disk is not used; measure nothing. Raises as `find`."""
    backend = get_backend(device_type)
    key = backend.device_type, torch.get_num_threads()
    known = _found.get(key)
    if known is None:
        known = _found.setdefault(key, _look_up(backend))  # another thread may have measured it meanwhile
    if known.backend is not backend:
        known = _found[key] = _look_up(backend)
    return known


def forget(key: tuple[str, int] | None = None, replacement: Lookup | None = None) -> None:
    """Forget the profiles of this process, or that of one key, not those on disk; or replace the latter.

    POLYCAST_PROFILE is read again.
    """
    devices = {device for device, _ in _found} if key is None else {key[0]}
    if key is None:
        _found.clear()
    elif replacement is None:
        _found.pop(key, None)
    else:
        _found[key] = replacement
    for device in devices:
        refresh_backend(device)


def _look_up(backend: Backend) -> Lookup:
    named = _named_by_user(backend.device_type)
    if named is not None:
        _log.info("%s: the profile is that of POLYCAST_PROFILE, measured %s", backend.device_type, named.date)
        return Lookup(backend, named)
    kept = _kept(backend, Conditions.now(backend))
    if kept.profile is not None:
        _log.info("%s: the profile on disk is used, measured %s", backend.device_type, kept.profile.date)
    else:
        _log.info("%s: no profile on disk is used: %s", backend.device_type, kept.refusal or "there is none")
    return kept


def _kept(backend: Backend, conditions: Conditions) -> Lookup:
    """Return the profile on disk, or why it is not used."""
    try:
        return Lookup(backend, profile_file.read(conditions))
    except profile_file.ProfileFileError as error:
        return Lookup(backend, None, str(error))


def _named_by_user(device_type: str) -> DeviceProfile | None:
    """Return the profile that POLYCAST_PROFILE names, if it is of this device type."""
    path = os.environ.get("POLYCAST_PROFILE") or None
    if path is None:
        return None
    try:
        named = DeviceProfile.load(path)
    except ValueError as error:
        raise ValueError(f"POLYCAST_PROFILE: {error}") from error
    return named if named.device_type == device_type else None


def _measured(backend: Backend, refresh: bool) -> tuple[DeviceProfile, str]:
    with _import_lock:
        from .measure import measure  # few programs measure

    if backend.device_type in _being_measured:
        raise RuntimeError(
            f"the profile of {backend.device_type} was requested while it is measured, by the code that is measured"
        )
    conditions = Conditions.now(backend)
    with profile_file.locked(conditions), ExitStack() as stack:
        _being_measured.add(backend.device_type)
        stack.callback(_being_measured.discard, backend.device_type)
        key = backend.device_type, conditions.threads
        if not refresh:
            forget(key)  # others may be on no disk
            found = find(backend.device_type)  # another process may have measured it
            if found is not None:
                return found, ""
        kept = _kept(backend, conditions)
        if kept.warning is not None:
            announce(kept.warning)
        threads = f"{conditions.threads} thread{'s' * (conditions.threads != 1)}"
        announce(f"measuring what is fast on {backend.device_type} with {threads}, once for this torch ...")
        began = time.perf_counter()
        new = measure(backend)
        measured = kept.profile if new.is_noisy and kept.profile and kept.profile.noise <= new.noise else new
        _log.info("%s: the profile was measured in %.1f s", backend.device_type, time.perf_counter() - began)
        if measured is not kept.profile:
            try:
                profile_file.write(conditions, measured)
            except profile_file.ProfileFileError as error:
                warn_user(f"polycast measured {backend.device_type} for this process alone: {error}")
    forget(key, Lookup(backend, measured) if _named_by_user(backend.device_type) is None else None)
    return measured, noise_of(new, measured) if new.is_noisy else ""


def noise_of(measured: DeviceProfile, used: DeviceProfile) -> str:
    """Return a sentence that says why a measurement is noisy, what is used, and what to do."""
    why = (
        f"other processes or a limit took {measured.other_load:.0%} of the processors' time"
        if measured.other_load > BUSY
        else "repeated times differ"
    )
    return (
        f"the measurement is noisy ({why}); {'its times' if used is measured else f'the profile of {used.date}'} "
        f"will be used until you measure again while the machine is idle: polycast profile {measured.device_type} "
        "--refresh. Or set POLYCAST_PROFILE to a saved profile."
    )


def _reset_lock() -> None:
    """Forget the parent's threads, one of which may be measuring; called in the child of a fork."""
    global _lock
    _lock = threading.RLock()
    _being_measured.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_lock)
