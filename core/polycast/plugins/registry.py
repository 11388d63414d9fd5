"""Which backend serves which device type: the backends of this process, and the questions asked of them."""

import os
import threading
from collections.abc import Mapping
from types import MappingProxyType

import torch

from ..common import env
from ..common.atfork import hold_during_fork
from ..errors import BackendBrokenError, BackendConflictError, BackendNotFoundError
from ..torch_internals.dispatcher import autocast_supported_devices
from . import hookspecs
from .backend import Backend
from .discovery import BackendStatus, Loads, Slot, check_availability, discover


class Registry:
    """The backends of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._discovered: dict[str, Slot] | None = None
        self.ready: dict[str, Backend] = {}
        """By device type, backends that are loaded and in force: a shorter way to what `find` returns."""

    def _slots(self) -> dict[str, Slot]:
        slots = self._discovered
        if slots is None:
            with self._lock:
                if self._discovered is None:
                    self._discovered = discover()
                slots = self._discovered
        return slots

    def parse_device_type(self, device_type: object) -> str:
        """Return the device type that a device string such as ``"cuda"`` or ``"cuda:1"`` means.

        Raises:
            ValueError: not a str.
            RuntimeError: not a device string that torch knows.
        """
        if not isinstance(device_type, str):
            raise ValueError(f"Expected `device_type` of type `str`, got: `{type(device_type)}`")
        name = _torch_device_type(device_type)
        if name is None:
            # The device of an out-of-tree backend has a name once its plugin, or the package under it, is imported.
            slot = self._slots().get(device_type.partition(":")[0])
            if slot is not None:
                slot.backend()
                name = _torch_device_type(device_type)
        if name is None:
            raise RuntimeError(f"Invalid device string: {device_type!r}")
        return name

    def find(self, device_type: object) -> Backend:
        """Return the backend of a device; see :func:`get_backend`."""
        if isinstance(device_type, str) and device_type in self.ready:
            return self.ready[device_type]
        name = self.parse_device_type(device_type)
        slot = self._slots().get(name)
        if slot is None:
            raise BackendNotFoundError(
                f"No polycast backend is installed for {name!r}. Backends are installed for: "
                f"{', '.join(sorted(self._slots())) or 'no device'}. Install a distribution that supplies one in the "
                f"entry-point group {hookspecs.ENTRY_POINT_GROUP!r}, or pass yours to polycast.register_backend()."
                f"{_where_not_looked()}"
            )
        backend = slot.backend()
        with self._lock:
            if (slot.by_hand or slot.loaded) is backend:
                self.ready[name] = backend
        return backend

    def offered(self) -> frozenset[str]:
        """Return the device types that somebody offers a backend for; loads none."""
        return frozenset(self._slots())

    def loading(self) -> list[Slot]:
        """Return the device types whose plugins are being imported."""
        return [slot for slot in list((self._discovered or {}).values()) if slot.loading]

    def forget_other_threads(self) -> None:
        """In the child of a fork: nobody loads a plugin any more, for it was another thread that did."""
        for slot in (self._discovered or {}).values():
            slot.lock, slot.loading = threading.RLock(), False

    def statuses(self) -> Mapping[str, BackendStatus]:
        """See :func:`backends`."""
        slots = self._slots().copy()
        known = {name: slot.status() for name, slot in slots.items()}
        for name in autocast_supported_devices():  # now: a plugin that was just loaded may have named one
            if name not in slots:
                reason = (
                    f"A plugin is needed: no distribution has an entry point {name!r} in the group "
                    f"{hookspecs.ENTRY_POINT_GROUP!r}.{_where_not_looked()}"
                )
                known[name] = BackendStatus(name, "missing", reason)
        return MappingProxyType(dict(sorted(known.items())))

    def register(self, backend: Backend) -> None:
        """Register a valid backend by hand; the kernels of the one before it are uninstalled."""
        slots = self._slots()
        with self._lock:
            slot = slots.setdefault(backend.device_type, Slot(backend.device_type))
            if slot.by_hand is not None:
                raise ValueError(
                    f"A backend for {backend.device_type!r} is already registered by hand: {slot.by_hand!r}. "
                    f"Call polycast.unregister_backend({backend.device_type!r}) first."
                )
            slot.by_hand = backend
            self.ready.pop(backend.device_type, None)

    def unregister(self, name: str) -> None:
        """Undo :meth:`register` for a device type, whose kernels are uninstalled."""
        slots = self._slots()
        with self._lock:
            slot = slots.get(name)
            if slot is None or slot.by_hand is None:
                raise BackendNotFoundError(
                    f"No backend for {name!r} is registered by hand. One found through an entry point is switched "
                    f"off with POLYCAST_BLOCK={name}."
                )
            slot.by_hand = None
            self.ready.pop(name, None)
            if not slot.candidates:
                del slots[name]


def _where_not_looked() -> str:
    return "" if env.discovery() else " Third parties' are not looked for, because POLYCAST_DISCOVERY is off."


def _torch_device_type(device: str) -> str | None:
    try:
        return torch.device(device).type
    except (RuntimeError, IndexError):  # the latter for "cpu:"
        return None


registry = Registry()
hold_during_fork(lambda: [Loads(registry.loading), registry._lock])
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=registry.forget_other_threads)


def backends() -> Mapping[str, BackendStatus]:
    """Return the status of every device type that has a backend, or for which torch's autocast could have one.

    Imports every plugin that is not blocked. The mapping is a read-only snapshot.

    Raises:
        ValueError: a ``POLYCAST_`` variable has a value that is not legal.

    Example:
        >>> import polycast
        >>> polycast.backends()["cpu"].state
        'ready'
    """
    return registry.statuses()


def get_backend(device_type: str) -> Backend:
    """Return the backend of a device type, also where the device cannot be used now.

    Args:
        device_type: a device string that torch knows, such as ``"cuda"``.

    Raises:
        ValueError: `device_type` is not a str, or a ``POLYCAST_`` variable has a value that is not legal.
        RuntimeError: torch does not know the device string.
        BackendNotFoundError: no backend is installed for it, or it is blocked.
        BackendBrokenError: its plugin cannot be loaded; the cause is chained.
        BackendConflictError: several distributions supply it.
    """
    return registry.find(device_type)


def is_autocast_available(device_type: str) -> bool:
    """Say whether ``autocast(device_type)`` can run enabled here and now.

    That is: a backend is installed for it and is not broken, blocked or in conflict; torch has an Autocast key for it;
    and the backend's own check says that the device can be used.

    Args:
        device_type: a device string that torch knows, such as ``"xpu"``.

    Raises:
        ValueError: `device_type` is not a str, or a ``POLYCAST_`` variable has a value that is not legal.
        RuntimeError: torch does not know the device string.

    Example:
        >>> import polycast
        >>> polycast.is_autocast_available("cpu")
        True
    """
    try:
        backend = registry.find(device_type)
    except (BackendNotFoundError, BackendBrokenError, BackendConflictError):
        return False
    return check_availability(backend).available
