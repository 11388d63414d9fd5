"""The registry: the backend of each device type in this process."""

import difflib
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from ..common import env
from ..common.atfork import hold_during_fork
from ..errors import BackendBrokenError, BackendConflictError, BackendNotFoundError
from ..torch_internals.dispatcher import autocast_supported_devices
from . import hookspecs
from .backend import Backend, Extension
from .backend_loader import BackendLoader, BackendStatus
from .checks import check_availability
from .discovery import discover, discover_extensions
from .extensions import AddedPolicy, DeviceExtensions

_ANY_ACCELERATOR = ("gpu", "accelerator")
"""Names of no device in particular."""
_UNNAMED = "privateuseone"
"""torch's name of an out-of-tree device that no plugin has named."""


class Registry:
    """The backends of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a finalizer or a signal handler may look up a device
        self._discovered: dict[str, BackendLoader] | None = None
        self._extensions: dict[str, DeviceExtensions] = {}
        self.ready: dict[str, Backend] = {}
        """The loaded backends by device type: a fast path of `find`."""

    def loaders(self) -> dict[str, BackendLoader]:
        """Return the loaders by device type, from the metadata of installed distributions, which is read once."""
        loaders = self._discovered
        if loaders is None:
            with self._lock:
                if self._discovered is None:
                    extensions, found = discover_extensions(), discover()
                    if self._discovered is None:  # else a finalizer or a signal handler has looked up a device
                        self._extensions, self._discovered = extensions, found
                loaders = self._discovered
        return loaders

    def parse_device_type(self, device_type: object) -> str:
        """Return the device type of a device string such as ``"cuda"`` or ``"cuda:1"``.

        Raises:
            ValueError: `device_type` is not a str.
            RuntimeError: torch does not know the device string.
        """
        if not isinstance(device_type, str):
            raise ValueError(f"Expected `device_type` of type `str`, got: `{type(device_type)}`")
        name = _torch_device_type(device_type)
        if name is None:
            # torch may learn the name of an out-of-tree device from the import of its plugin.
            loader = self.loaders().get(device_type.partition(":")[0])
            if loader is not None:
                loader.get()
                name = _torch_device_type(device_type)
        if name is None:
            raise RuntimeError(f"Invalid device string: {device_type!r}.{self._device_hint(device_type)}")
        return name

    def _device_hint(self, device: str) -> str:
        """Return sentences for the error of a device string that torch does not know."""
        installed, name = sorted(self.loaders()), device.partition(":")[0]
        alike = difflib.get_close_matches(name.lower(), installed, n=1, cutoff=0.7)
        nearest = f" Did you mean {alike[0]!r}?" if alike else ""
        if name.lower() in _ANY_ACCELERATOR:
            accelerator = torch.accelerator.current_accelerator()
            nearest = f" Did you mean {accelerator.type!r}?" if accelerator else " This torch was built without GPUs."
        return (
            f"{nearest} Backends are installed for: {', '.join(installed) or 'no device'}. The plugin of another "
            f"device has an entry point of the device's name in the group {hookspecs.ENTRY_POINT_GROUP!r}."
            f"{_discovery_hint()}"
        )

    def find(self, device_type: object) -> Backend:
        """Return the backend of a device; see :func:`get_backend`."""
        if isinstance(device_type, str) and device_type in self.ready:
            return self.ready[device_type]
        name = self.parse_device_type(device_type)
        loader = self.loaders().get(name)
        if loader is None:
            raise BackendNotFoundError(
                f"No polycast backend is installed for {name!r}. Backends are installed for: "
                f"{', '.join(sorted(self.loaders())) or 'no device'}. Install a distribution that supplies one in the "
                f"entry-point group {hookspecs.ENTRY_POINT_GROUP!r}, or pass yours to "
                f"polycast.plugin.register_backend().{_discovery_hint()}"
            )
        backend = loader.get()
        extensions = self._extensions_of(name)
        extensions.policies(backend)  # raises a conflict
        with self._lock:
            if loader.current is backend and extensions.are_known:
                self.ready[name] = backend
        return backend

    def loaded(self, device_type: str) -> Backend | None:
        """Return the backend of a device if it is loaded or registered by hand; import nothing."""
        loader = (self._discovered or {}).get(device_type)
        return None if loader is None else loader.current

    def forget(self) -> None:
        """Read the entry points again at the next use; backends that are registered by hand stay.

        No kernels may be installed.
        """
        by_hand = [loader.by_hand for loader in self.discovered() if loader.by_hand is not None]
        with self._lock:
            self._discovered = None
            self.ready.clear()
        for backend in by_hand:
            self.register(backend)

    def discovered(self) -> list[BackendLoader]:
        """Return the loaders, if discovery has run."""
        return list((self._discovered or {}).values())

    def extended(self) -> list[DeviceExtensions]:
        """Return what the extensions of each device are loaded by, if discovery has run."""
        return list(self._extensions.values())

    def _extensions_of(self, device_type: str) -> DeviceExtensions:
        self.loaders()
        return self._extensions.get(device_type) or DeviceExtensions(device_type)

    def extensions(self, device_type: str) -> Sequence[Extension]:
        """Return what packages add to a device, as far as it can be used, in the order in which kernels are asked."""
        return self._extensions_of(device_type).get()

    def added_policies(self, backend: Backend) -> Mapping[str, AddedPolicy]:
        """Return the policies that extensions add to the table of a backend."""
        return self._extensions_of(backend.device_type).policies(backend)

    def version(self, given: Extension) -> str:
        """Return what :meth:`source` does, as one text."""
        return " ".join(self.source(given)).strip()

    def source(self, given: Extension) -> tuple[str, str]:
        """Return the name and the version of the distribution that supplies a backend or an extension.

        Both are empty for a backend that is registered by hand.
        """
        if not isinstance(given, Backend):
            return self._extensions_of(given.device_type).distribution(given)
        loader = self.loaders().get(given.device_type)
        return ("", "") if loader is None or loader.loaded is not given else loader.distribution

    def statuses(self) -> Mapping[str, BackendStatus]:
        """See :func:`backends`."""
        from .statuses import BackendStatuses  # few programs print a table

        find = {name: partial(self._status, loader) for name, loader in self.loaders().copy().items()}
        will_be_named = any(_torch_device_type(name) is None for name in find)  # by a plugin, when it is imported
        for name in autocast_supported_devices():
            if name not in find and not (will_be_named and name == _UNNAMED):
                find[name] = partial(_missing, name)
        return BackendStatuses(find)

    def _status(self, loader: BackendLoader) -> BackendStatus:
        status, extensions = loader.status(), self._extensions_of(loader.device_type)
        if loader.current is None:
            return status
        with suppress(Warning):  # that an extension is broken, which its name here says
            extensions.names()
        given = (loader.current, *extensions.get())
        packages = tuple(package for each in given for package in each.ops_in_cpp)
        status = replace(status, extensions=extensions.names(), ops_in_cpp=packages)
        try:
            extensions.policies(loader.current)
        except BackendConflictError as error:
            return replace(status, state="conflict", reason=str(error))
        return status

    def register(self, backend: Backend) -> None:
        """Register a valid backend by hand; the kernels of the one before it are uninstalled."""
        loaders = self.loaders()
        with self._lock:
            loader = loaders.setdefault(backend.device_type, BackendLoader(backend.device_type))
            if loader.by_hand is not None:
                raise ValueError(
                    f"A backend for {backend.device_type!r} is already registered by hand: {loader.by_hand!r}. "
                    f"Call polycast.plugin.unregister_backend({backend.device_type!r}) first."
                )
            loader.by_hand = backend
            self.ready.pop(backend.device_type, None)

    def unregister(self, name: str) -> None:
        """Undo :meth:`register` for a device type, whose kernels are uninstalled."""
        loaders = self.loaders()
        with self._lock:
            loader = loaders.get(name)
            if loader is None or loader.by_hand is None:
                raise BackendNotFoundError(
                    f"No backend for {name!r} is registered by hand. One found through an entry point is switched "
                    f"off with POLYCAST_BLOCK={name}."
                )
            loader.by_hand = None
            self.ready.pop(name, None)
            if not loader.candidates:
                del loaders[name]


def _missing(name: str) -> BackendStatus:
    reason = (
        f"A plugin is needed: no distribution has an entry point {name!r} in the group "
        f"{hookspecs.ENTRY_POINT_GROUP!r}.{_discovery_hint()}"
    )
    return BackendStatus(name, "missing", reason)


def _discovery_hint() -> str:
    return "" if env.discovery() else " Plugins of third parties are ignored, because POLYCAST_DISCOVERY is off."


def _torch_device_type(device: str) -> str | None:
    try:
        return torch.device(device).type
    except (RuntimeError, IndexError):  # IndexError for "cpu:"
        return None


def _reset_loaders() -> None:
    for loader in registry.discovered():
        loader.reset()
    for extensions in registry.extended():
        extensions.reset()


registry = Registry()
hold_during_fork(lambda: [registry._lock])
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_loaders)


def backends() -> Mapping[str, BackendStatus]:
    """Return the status of every device type that has a backend or a torch Autocast key, in a read-only mapping.

    A status is found when it is first read, which imports the plugin of that device only. ``print`` and notebooks show
    a table of all.

    Raises:
        ValueError: a ``POLYCAST_`` variable has an invalid value.

    Example:
        >>> import polycast
        >>> polycast.backends()["cpu"].state
        'ready'
    """
    return registry.statuses()


def get_backend(device_type: str) -> Backend:
    """Return the backend of a device type, even if the device cannot be used now.

    Args:
        device_type: a device string that torch knows, such as ``"cuda"``.

    Raises:
        ValueError: `device_type` is not a str, or a ``POLYCAST_`` variable has an invalid value.
        RuntimeError: torch does not know the device string.
        BackendNotFoundError: no backend is installed for it, or it is blocked.
        BackendBrokenError: its plugin cannot be loaded; the cause is chained.
        BackendConflictError: several distributions supply it.
    """
    return registry.find(device_type)


def is_autocast_available(device_type: str) -> bool:
    """Return whether ``autocast(device_type)`` would be enabled now.

    It is if a backend for the device is installed and not broken, blocked or in conflict, torch has an Autocast key for
    the device, and the backend says that it can be used. ``polycast.backends()[device_type].reason`` says why not.

    Args:
        device_type: a device string that torch knows, such as ``"xpu"``.

    Raises:
        ValueError: `device_type` is not a str, or a ``POLYCAST_`` variable has an invalid value.
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
