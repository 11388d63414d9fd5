"""The registry: the backend of each device type in this process, found in the metadata of installed distributions."""

import difflib
import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..common import env
from ..common.announce import log
from ..common.atfork import call_in_forked_child, fork_safe_lock
from ..common.versions import name_and_version
from ..errors import BackendBrokenError, BackendConflictError, BackendNotFoundError, warn_user
from ..torch_internals.dispatcher import has_autocast_key
from .backend import Backend, Extension
from .backend_loader import BackendLoader
from .checks import ask
from .extensions import AddedPolicy, DeviceExtensions
from .hookspecs import ENTRY_POINT_GROUP, EXTENSIONS_GROUP, GENERIC, Candidate

AUTO = "auto"
"""The name of the accelerator that torch finds or, without one, of the host."""
_ANY_ACCELERATOR = ("gpu", "accelerator")
"""Names of no device in particular."""


@dataclass
class Discovery:
    """Holds the loaders and extensions that installed distributions offer, by device type, and the generic loader.

    A device that the generic loader serves is added to `loaders` when it is used.
    """

    loaders: dict[str, BackendLoader]
    extensions: dict[str, DeviceExtensions]
    generic: BackendLoader | None

    def loader_of(self, device_type: str) -> BackendLoader | None:
        """Return the loader of a device type that torch knows; None if no backend is offered for it."""
        if self.generic is not None and device_type not in self.loaders and _may_be_generic(device_type):
            blocked = self.generic.blocked or device_type in env.blocked()
            provider = env.providers().get(device_type, self.generic.provider)
            loader = BackendLoader(device_type, blocked, provider, self.generic.candidates)
            return self.loaders.setdefault(device_type, loader)
        return self.loaders.get(device_type)

    def log(self) -> None:
        """Log what is offered; without a lock, as handlers are code of the program."""
        for offered in list[BackendLoader | DeviceExtensions]([*self.loaders.values(), *self.extensions.values()]):
            for each in offered.candidates:
                log.debug("%s: offered in %s by %s", offered.device_type, each.entry_point.group, each)
        for name in sorted(env.blocked()):
            log.info("%s: POLYCAST_BLOCK switches its backend off", name)


def discover() -> Discovery:
    """Read the metadata of installed distributions.

    Raises:
        ValueError: a ``POLYCAST_`` variable has an invalid value, also one that matters to others.
    """
    env.engine()
    third_party, blocked, providers, has_generic = env.discovery(), env.blocked(), env.providers(), env.generic()
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    loaders: dict[str, BackendLoader] = {}
    for candidate in _candidates(entry_points, third_party):
        name = candidate.device_type
        loader = loaders.setdefault(name, BackendLoader(name, name in blocked, providers.get(name)))
        loader.candidates.append(candidate)
    generic = loaders.pop(GENERIC, None)
    offered = {entry_point.name.partition(".")[0] for entry_point in entry_points} - {GENERIC}
    _warn_of_unknown("POLYCAST_BLOCK", blocked, offered)
    _warn_of_unknown("POLYCAST_PROVIDER", providers, offered)
    return Discovery(loaders, _discover_extensions(), generic if has_generic else None)


def _may_be_generic(name: str) -> bool:
    """Return whether a generic backend may serve a device: torch has an Autocast key and a module for it."""
    return hasattr(torch, name) and torch_device_type(name) == name and has_autocast_key(name)


def _discover_extensions() -> dict[str, DeviceExtensions]:
    """Return what installed distributions add to each device type, those of third parties first."""
    candidates = _candidates(importlib.metadata.entry_points(group=EXTENSIONS_GROUP), env.discovery())
    extensions: dict[str, DeviceExtensions] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.built_in):
        name = candidate.device_type
        extensions.setdefault(name, DeviceExtensions(name)).candidates.append(candidate)
    return extensions


def _candidates(entry_points: Iterable[importlib.metadata.EntryPoint], third_party: bool) -> list[Candidate]:
    """Return the candidates that entry points offer, by name: the order of distributions in a folder is arbitrary."""
    candidates = [Candidate(*name_and_version(entry_point), entry_point) for entry_point in entry_points]
    return sorted((each for each in candidates if each.built_in or third_party), key=str)


def _warn_of_unknown(variable: str, named: Iterable[str], offered: Iterable[str]) -> None:
    """Warn of device types that a variable names in vain: no backend is offered for them."""
    for device_type in sorted(name for name in {*named} - {*offered, GENERIC} if not _may_be_generic(name)):
        from ..policy.names import hint  # most programs are not warned

        warn_user(
            f"{variable} names {device_type!r}, which no installed distribution offers a backend for: "
            + hint(device_type, sorted(offered))
        )


class Registry:
    """The backends of this process."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()  # reentrant: a finalizer or a signal handler may look up a device
        self._discovered: Discovery | None = None
        self.ready: dict[str, Backend] = {}
        """The loaded backends by device type: a fast path of `find`."""
        self.used = set[str]()  # the device types for which kernels were installed

    def discovery(self) -> Discovery:
        """Return what installed distributions offer. The metadata are read once."""
        found = self._discovered
        if found is None:
            new = None
            with self._lock:
                if self._discovered is None:
                    new = discover()
                    if self._discovered is None:  # else a finalizer or a signal handler has looked up a device
                        self._discovered = new
                found = self._discovered
            if new is not None and found is new:
                new.log()
        return found

    def adopt(self, discovery: Discovery) -> None:
        """Replace what was found. No kernels may be installed for devices whose loaders differ."""
        with self._lock:
            self._discovered = discovery
            self.ready.clear()

    def loaders(self) -> dict[str, BackendLoader]:
        """Return the loaders by device type."""
        return self.discovery().loaders

    def parse_device_type(self, device_type: object) -> str:
        """Return the device type of a device string such as ``"cuda"`` or ``"cuda:1"``, or of ``"auto"``.

        Raises:
            ValueError: `device_type` is not a str.
            RuntimeError: torch does not know the device string.
        """
        if not isinstance(device_type, str):
            raise ValueError(f"Expected `device_type` of type `str`, got: `{type(device_type)}`")
        if device_type == AUTO:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            return torch.default_generator.device.type if accelerator is None else accelerator.type
        name = torch_device_type(device_type)
        if name is None:
            # torch may learn the name of an out-of-tree device from the import of its plugin.
            loader = self.loaders().get(device_type.partition(":")[0])
            if loader is not None:
                loader.get()
                name = torch_device_type(device_type)
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
            f"device has an entry point of the device's name in the group {ENTRY_POINT_GROUP!r}."
            f"{discovery_hint()}"
        )

    def find(self, device_type: object) -> Backend:
        """Return the backend of a device; see :func:`get_backend`."""
        ready = self.ready.get(device_type) if isinstance(device_type, str) else None
        if ready is not None:
            return ready
        name = self.parse_device_type(device_type)
        found = self.discovery()
        loader = found.loader_of(name)
        if loader is None:
            raise BackendNotFoundError(
                f"No polycast backend is installed for {name!r}. Backends are installed for: "
                f"{', '.join(sorted(self.loaders())) or 'no device'}. Install a distribution that supplies one in the "
                f"entry-point group {ENTRY_POINT_GROUP!r}, or pass yours to "
                f"polycast.plugin.register_backend().{discovery_hint()}"
            )
        backend = loader.get()
        extensions = self.extensions_of(name)
        extensions.policies(backend)  # raises a conflict
        with self._lock:
            if self._discovered is found and loader.current is backend and extensions.are_known:
                self.ready[name] = backend
        return backend

    def loaded(self, device_type: str) -> Backend | None:
        """Return the backend of a device if it is loaded or registered by hand; import nothing."""
        loader = None if self._discovered is None else self._discovered.loaders.get(device_type)
        return None if loader is None else loader.current

    def reset(self) -> None:
        """Forget the threads of the parent; called in the child of a fork."""
        if self._discovered is not None:
            found = self._discovered
            for each in list[BackendLoader | DeviceExtensions]([*found.loaders.values(), *found.extensions.values()]):
                each.reset()

    def extensions_of(self, device_type: str) -> DeviceExtensions:
        """Return what loads the extensions of a device."""
        return self.discovery().extensions.get(device_type) or DeviceExtensions(device_type)

    def extensions(self, device_type: str) -> Sequence[Extension]:
        """Return what packages add to a device, as far as it can be used, in the order in which kernels are asked."""
        return self.extensions_of(device_type).get()

    def added_policies(self, backend: Backend) -> Mapping[str, AddedPolicy]:
        """Return the policies that extensions add to the table of a backend."""
        return self.extensions_of(backend.device_type).policies(backend)

    def source(self, given: Extension) -> tuple[str, str]:
        """Return the name and the version of the distribution that supplies a backend or an extension.

        Both are empty for a backend that is registered by hand.
        """
        if not isinstance(given, Backend):
            return self.extensions_of(given.device_type).distribution(given)
        loader = self.loaders().get(given.device_type)
        return ("", "") if loader is None or loader.loaded is not given else loader.distribution

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


def discovery_hint() -> str:
    """Return the end of an error's text that says that third parties are ignored, if they are."""
    return "" if env.discovery() else " Plugins of third parties are ignored, because POLYCAST_DISCOVERY is off."


def torch_device_type(device: str) -> str | None:
    """Return the device type of a device string; None if torch does not know it."""
    try:
        return torch.device(device).type
    except (RuntimeError, IndexError):  # IndexError for "cpu:"
        return None


registry = Registry()
call_in_forked_child(registry.reset)


def get_backend(device_type: str) -> Backend:
    """Return the backend of a device type, even if the device cannot be used now.

    Args:
        device_type: a device string that torch knows, such as ``"cuda"``, or ``"auto"``, as for a region.

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
        device_type: a device string that torch knows, such as ``"xpu"``, or ``"auto"``, as for a region.

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
    return ask(backend).available
